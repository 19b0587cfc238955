"""Conversion between HostTensor and torch, through raw bytes: numpy has no bfloat16."""

from __future__ import annotations

import torch
from vllm.config import ModelConfig

from omni_actors.errors import InvalidPayload
from omni_actors.protocol.tensors import DType, HostTensor

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F32: torch.float32,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.U8: torch.uint8,
}
_WIRE_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

# Names of the tensors that carry an encoded vLLM request from the prompt stage to the thinker: this + "0", "1", ...
FRAME_PREFIX = "vllm."


def to_torch(tensor: HostTensor, what: str = "tensor") -> torch.Tensor:
    """Copy a HostTensor to a CPU tensor: its bytes may be a socket frame or shared memory that is soon reused.

    Raises:
        InvalidPayload: dtype, shape and length disagree.
    """
    tensor.validate(what)
    result = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
    if result.numel():
        result.view(-1).view(torch.uint8).numpy().data[:] = memoryview(tensor.data).cast("B")
    return result


def to_host(tensor: torch.Tensor) -> HostTensor:
    """A HostTensor that shares the memory of a CPU tensor, which must not be changed afterwards.

    Raises:
        InvalidPayload: the wire has no such dtype.
    """
    dtype = _WIRE_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidPayload(f"Tensors of {tensor.dtype} cannot be sent; only {[name.value for name in DType]} can.")
    contiguous = tensor.detach().contiguous()
    data = contiguous.view(-1).view(torch.uint8).numpy().data if contiguous.numel() else memoryview(b"")
    return HostTensor(dtype, tuple(contiguous.shape), data)


def embeds_width(config: ModelConfig) -> int:
    """The width of the prompt embeddings that a model takes; 0 if they are turned off."""
    return config.get_inputs_embeds_size() if config.enable_prompt_embeds else 0


def check_rows(tensor: HostTensor, width: int, what: str, *, minimum: int = 0) -> None:
    """Raise `InvalidPayload` unless `tensor` is of a floating dtype and the shape [n >= minimum, width]."""
    tensor.validate(what)
    if tensor.dtype not in (DType.BF16, DType.F16, DType.F32):
        raise InvalidPayload(f"{what}: rows need a floating dtype; got {tensor.dtype}.")
    if len(tensor.shape) != 2 or tensor.shape[1] != width or tensor.shape[0] < minimum:
        raise InvalidPayload(f"{what}: needs the shape [n >= {minimum}, {width}]; got {list(tensor.shape)}.")
