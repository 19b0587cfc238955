"""Rows (hidden states, embeddings) between messages and devices: tensors, their budget, the device's cache.

`RowBudget`: a request counts from when it is opened until it is closed, with all its rows. It is *admitted* when the
scheduler takes it into its batch for the first time; what it receives after that is taken whatever it amounts to,
because a started request must be able to end. Only admission waits, in the order in which the scheduler
considers requests, and a request that is larger than the budget is admitted when no other holds rows.

`RowCache`: a position that comes from the prefix cache is not computed and gives no row, but the next stage needs one
for every position. So rows are kept by the hash of their block of the KV cache, and a request takes from the prefix
cache only what there are rows for. While a request computes blocks, others that begin with them wait for its rows:
answers to one prompt that come at a time would else compute it several times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.v1.request import Request

from omni_actors.errors import EngineError, InvalidPayload, ModelOutputInvalid
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.sharing import Budget
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.metrics import Metric

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


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity. Either is an extreme; extremes are found 15 times sooner."""
    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())


def check_finite(tensor: torch.Tensor, what: str) -> None:
    """Raise `ModelOutputInvalid` for an output that is no number."""
    if not is_finite(tensor):
        raise ModelOutputInvalid(f"There are NaN or infinite values in the model's {what}.")


def moved(tensor: torch.Tensor, device: torch.device, *, copy: bool = False) -> torch.Tensor:
    """The tensor on the device, from the CPU through pinned memory: any other copy waits for all work queued there."""
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True, copy=copy)


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


def budget_values(held: Budget, step_bytes: int, waiting: int, deferrals: int) -> dict[Metric, float]:
    """The metrics of a stage's budget.

    Args:
        held: for requests, in a step or not; in an autoregressive stage also for those not yet admitted.
        step_bytes: needed by the latest step in addition.
        waiting: requests, or chunks of sound, that the latest step left out.
        deferrals: how often, since the engine was made, work was left out of a step.
    """
    return {
        table.BUDGET_BYTES: held.limit,
        table.BUDGET_HELD: held.used,
        table.BUDGET_STEP: step_bytes,
        table.BUDGET_WAITING: waiting,
        table.BUDGET_DEFERRALS: deferrals,
    }


class RowBudget:
    """Decides which requests are admitted. Not thread-safe.

    Args:
        limit: bytes that the admitted requests may hold at the moment when another one is admitted.

    Attributes:
        rows: of all requests, those that wait included.
        admitted: requests that the scheduler has taken into its batch.
        deferrals: admissions put off, counted in every step.
    """

    def __init__(self, limit: int) -> None:
        self.rows = Budget(limit)
        self.admitted: set[str] = set()
        self.deferrals = 0
        self._promised = 0  # bytes of the admitted and, in this step, of those that may be
        self._refused: set[str] = set()  # requests that wait, as of the last step

    @property
    def waiting(self) -> int:
        """Requests whose admission was put off in the last step, for lack of room or because an earlier one waits."""
        return len(self._refused)

    def begin_step(self) -> None:
        """Begin a pass over the requests that could be admitted."""
        self._promised = sum(map(self.rows.held_by, self.admitted))
        self._refused.clear()

    def admits(self, request_id: str) -> bool:
        """Whether a request, the next in order, may be admitted in this step. Always true for those that were before.

        None overtakes one that waits: a stream of small requests would keep a large one waiting forever.
        """
        if request_id not in self.rows or request_id in self.admitted:
            return True
        size = self.rows.held_by(request_id)
        if self._refused or (self._promised and self._promised + size > self.rows.limit):
            self._refused.add(request_id)
            self.deferrals += 1
            return False
        self._promised += size
        return True

    def release(self, request_id: str) -> None:
        """Free what a request holds."""
        self.rows.release(request_id)
        self.admitted.discard(request_id)
        self._refused.discard(request_id)

    def statistics(self) -> dict[Metric, float]:
        """The figures for the metrics."""
        return budget_values(self.rows, 0, self.waiting, self.deferrals)


class RowCache:
    """Rows [block_size, width] on the CPU by block; evicts the least recently used. Not thread-safe.

    Args:
        limit_bytes: of all rows together; 0 keeps none.
        block_size: positions of a block.
    """

    def __init__(self, limit_bytes: int, block_size: int) -> None:
        self.limit_bytes = limit_bytes
        self.block_size = block_size
        self.held_bytes = 0
        self._blocks: OrderedDict[Hashable, torch.Tensor] = OrderedDict()
        self._promises: dict[str, set[Hashable]] = {}  # blocks that requests compute, by request

    def __len__(self) -> int:
        return len(self._blocks)

    def covers(self, blocks: Sequence[Hashable]) -> int:
        """How many of the first blocks have rows."""
        return next((index for index, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def take(self, blocks: Sequence[Hashable]) -> list[torch.Tensor]:
        """The rows of the first blocks, as far as there are any. Of a prefix, the first block is removed last."""
        found = blocks[: self.covers(blocks)]
        for block in reversed(found):
            self._blocks.move_to_end(block)
        return [self._blocks[block] for block in found]

    def keep(self, block: Hashable, rows: torch.Tensor) -> None:
        """Keep a copy of a block's rows."""
        for promised in self._promises.values():
            promised.discard(block)
        if block in self._blocks or rows.nbytes > self.limit_bytes:
            return
        self._blocks[block] = rows.clone()  # it is a part of a whole step's
        self.held_bytes += rows.nbytes
        while self.held_bytes > self.limit_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.held_bytes -= oldest.nbytes

    def promise(self, request_id: str, blocks: Sequence[Hashable]) -> None:
        """Note that a request will compute blocks."""
        self._promises[request_id] = set(blocks)

    def release(self, request_id: str) -> None:
        """Forget what a request was to compute. Idempotent."""
        self._promises.pop(request_id, None)

    def promising(self) -> list[str]:
        """The requests that compute blocks."""
        return list(self._promises)

    def promised(self, blocks: Sequence[Hashable], request_id: str) -> bool:
        """Whether another request computes the first of the blocks that has no rows."""
        missing = self.covers(blocks)
        if missing == len(blocks) or not self.limit_bytes:
            return False
        return any(blocks[missing] in own for owner, own in self._promises.items() if owner != request_id)


class FollowedRows:
    """The rows of one request from its first position on, those of its prefix included.

    vLLM gives a request the hashes of its full blocks, which grow with the answer; each covers all tokens up to the
    block's end.
    """

    def __init__(self, cache: RowCache, request: Request) -> None:
        self.request_id = request.request_id
        self._cache = cache
        self._request = request
        self._prefix: list[torch.Tensor] = []
        self._end = 0  # positions whose rows have come
        self._unkept: list[torch.Tensor] = []  # rows of a block that is not full yet

    def _prompt_blocks(self) -> Sequence[Hashable]:
        """The blocks of the prompt that may come from the prefix cache: vLLM computes the last position anyway."""
        size = self._cache.block_size
        return self._request.block_hashes[: (self._request.num_prompt_tokens - 1) // size]

    def waits(self) -> bool:
        """Whether rows of its prefix are on their way, from a request that computes them."""
        return self._cache.promised(self._prompt_blocks(), self.request_id)

    def use(self, cached_tokens: int) -> int:
        """How many of the positions in the prefix cache it can use, whole blocks of them; takes their rows."""
        size = self._cache.block_size
        self._prefix = self._cache.take(self._request.block_hashes[: cached_tokens // size])
        covered = len(self._prefix)
        self._cache.promise(self.request_id, self._prompt_blocks()[covered:])
        return covered * size

    def close(self) -> None:
        """Note the end of the request: its rows have just been used."""
        self._cache.release(self.request_id)
        self._cache.take(self._request.block_hashes)

    def complete(self, emitted: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the worker gave the request in a step, with the rows of its prefix before the first one.

        Raises:
            EngineError: rows are missing.
        """
        start, rows = emitted["start"], emitted["rows"]
        if start > self._end:
            prefix = torch.cat([*self._prefix, rows[:0]])
            if len(prefix) < start:
                raise EngineError(f"Rows {len(prefix)} to {start} of request {self.request_id!r} are missing.")
            rows = torch.cat([prefix[self._end : start], rows])
            emitted = {**emitted, "start": self._end, "rows": rows}
            self._end, self._unkept = start, []
        if start == len(self._prefix) * self._cache.block_size:
            self._prefix = []
        self._keep(emitted["rows"][max(0, self._end - emitted["start"]) :])
        return emitted

    def _keep(self, rows: torch.Tensor) -> None:
        """Keep the blocks that are full with new rows."""
        size = self._cache.block_size
        self._unkept.append(rows)
        self._end += len(rows)
        if self._end // size == (self._end - len(rows)) // size:
            return
        joined = torch.cat(self._unkept)
        first = (self._end - len(joined)) // size
        for index, block in enumerate(self._request.block_hashes[first : self._end // size]):
            self._cache.keep(block, joined[index * size : (index + 1) * size])
        self._unkept = [joined[(self._end // size - first) * size :].clone()]
