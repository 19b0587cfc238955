"""Converts arrays of users into tensors that can be sent, without importing the library that made them."""

from __future__ import annotations

import array
import sys
from collections.abc import Mapping
from typing import Any

import numpy

from omni_actors.errors import InvalidRequest
from omni_actors.protocol.fields import Scalar
from omni_actors.protocol.payloads import ADDITIONAL_INFORMATION, PROMPT_EMBEDS, InformationValue
from omni_actors.protocol.tensors import DType, HostTensor

MAX_ENTRIES, MAX_NAME, MAX_LENGTH = 64, 128, 65536  # of additional information; checked again where it arrives
INTEGERS = range(-(2**63), 2**63)
_DTYPES = {
    "bfloat16": DType.BF16,  # a numpy dtype of ml_dtypes
    "float16": DType.F16,
    "float32": DType.F32,
    "int32": DType.I32,
    "int64": DType.I64,
    "uint8": DType.U8,
}
FLOATING = (DType.BF16, DType.F16, DType.F32)


def host_tensor(value: Any, where: str) -> HostTensor:
    """Copy an array into a `HostTensor`.

    Args:
        value: a numpy array, a torch tensor on any device, anything that numpy takes for an array, or a `HostTensor`.
        where: name of the field, for errors.

    Raises:
        InvalidRequest: it is no array, or has a dtype that cannot be sent.
    """
    if isinstance(value, HostTensor):
        return value.validate(where)
    torch = sys.modules.get("torch")  # if not imported, there is no tensor
    if torch is not None and isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        shape = tuple(value.shape)
        data = value.detach().cpu().contiguous().reshape(-1)
        return HostTensor(_dtype(name, where), shape, data.view(torch.uint8).numpy().tobytes())
    found = numpy.asarray(value)
    if found.dtype.byteorder == ">":
        found = found.astype(found.dtype.newbyteorder("<"))
    return HostTensor(_dtype(found.dtype.name, where), found.shape, found.tobytes())


def prompt_embeds(value: Any) -> HostTensor:
    """Copy the embeddings of a prompt. Raises `InvalidRequest` unless they are finite floats [positions, width]."""
    tensor = host_tensor(value, PROMPT_EMBEDS)
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise InvalidRequest(f"{PROMPT_EMBEDS} need the shape [positions, width]; got {list(tensor.shape)}.")
    if tensor.dtype not in FLOATING:
        raise InvalidRequest(f"{PROMPT_EMBEDS} must be float32, float16 or bfloat16; got {tensor.dtype}.")
    if not _finite(tensor):
        raise InvalidRequest(f"{PROMPT_EMBEDS} hold NaN or infinite values.")
    return tensor


def information_values(given: Mapping[str, Any]) -> dict[str, InformationValue]:
    """Check additional information and copy its arrays.

    Raises:
        InvalidRequest: there are too many entries, or one has a name or a value that cannot be sent.
    """
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{ADDITIONAL_INFORMATION} must be a mapping of names to values; got {_kind(given)}.")
    if len(given) > MAX_ENTRIES:
        raise InvalidRequest(f"{ADDITIONAL_INFORMATION} has {len(given)} entries; at most {MAX_ENTRIES} are allowed.")
    values: dict[str, InformationValue] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise InvalidRequest(f"{ADDITIONAL_INFORMATION}: a name has 1 to {MAX_NAME} characters; got {name!r:.80}.")
        where = f"{ADDITIONAL_INFORMATION}[{name!r}]"
        if isinstance(value, list | tuple) and not isinstance(value, HostTensor):
            if len(value) > MAX_LENGTH:
                raise InvalidRequest(f"{where} has {len(value)} items; send so many as an array.")
            values[name] = [_scalar(item, f"{where}[{index}]") for index, item in enumerate(value)]
        elif isinstance(value, Scalar | numpy.generic):
            values[name] = _scalar(value, where)
        elif isinstance(value, HostTensor | array.array | memoryview) or hasattr(value, "__array__"):
            values[name] = host_tensor(value, where)
        else:
            raise InvalidRequest(f"{where} must be a number, text, a list of these or an array; got {_kind(value)}.")
    return values


def _scalar(value: Any, where: str) -> Scalar:
    value = value.item() if isinstance(value, numpy.generic) else value
    if not isinstance(value, Scalar):
        raise InvalidRequest(f"{where} must be a number or text; got {_kind(value)}.")
    if isinstance(value, str) and len(value) > MAX_LENGTH:
        raise InvalidRequest(f"{where} has {len(value)} characters; at most {MAX_LENGTH} are allowed.")
    if isinstance(value, int) and value not in INTEGERS:
        raise InvalidRequest(f"{where} does not fit 64 bits.")
    return value


def _dtype(name: str, where: str) -> DType:
    if name not in _DTYPES:
        raise InvalidRequest(f"{where} has the dtype {name}, which cannot be sent; convert it to {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _finite(tensor: HostTensor) -> bool:
    if tensor.dtype is DType.BF16:  # numpy has none: infinite and NaN have all bits of the exponent set
        bits = numpy.frombuffer(tensor.data, "<u2")
        return not bool(((bits & 0x7F80) == 0x7F80).any())
    kind = "<f2" if tensor.dtype is DType.F16 else "<f4"
    return bool(numpy.isfinite(numpy.frombuffer(tensor.data, kind)).all())


def _kind(value: Any) -> str:
    return type(value).__name__
