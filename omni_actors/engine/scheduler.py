"""Schedulers of autoregressive stages: vLLM's own, plus input that arrives while a request runs.

A talker request starts with a few rows of the thinker's output; the rest arrives while it decodes. The scheduler keeps
the rows until the worker knows the request, ships them on the SchedulerOutput, and leaves a request whose next row has
not come out of the batch. Payloads of *new* requests need nothing here: they travel in
`SamplingParams.extra_args["omni"]`, which vLLM hands to the worker untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from omni_actors.errors import InvalidRequest, Overloaded


@runtime_checkable
class OmniSchedulerInterface(Protocol):
    """What the engine asks of a scheduler beyond vLLM's interface."""

    def has_runnable(self) -> bool:
        """Whether a step would do something; false while all requests wait for input."""
        ...

    def omni_counts(self) -> dict[str, int]:
        """What the scheduler holds beside vLLM's own state; all zero when idle."""
        ...


@dataclass(slots=True)
class RowUpdate:
    """Rows on their way to the worker: each [n, width] on the CPU, and whether they were the last."""

    rows: list[torch.Tensor] = field(default_factory=list)
    complete: bool = False


@dataclass(slots=True)
class RowStream:
    """Streamed input of one request: how many decode rows have come, and whether more will."""

    received: int
    complete: bool
    held_bytes: int
    pending: RowUpdate | None = None


class OmniSchedulerMixin:
    """Row streams on top of a vLLM scheduler. Wraps `super()` only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options: Mapping[str, Any] = (self.vllm_config.additional_config or {}).get("omni", {})
        self.row_budget_bytes: int = options.get("row_budget_bytes", 2 << 30)
        self.held_row_bytes = 0
        self.held_steps = 0  # how often a request was left out of a batch for want of input
        self._streams: dict[str, RowStream] = {}
        self._stalled = False  # the last schedule() found nothing to do, and nothing has happened since

    # -- streams

    def open_stream(self, request_id: str, *, received: int, complete: bool, n_bytes: int) -> None:
        """Register streamed input before `add_request`.

        Args:
            received: decode rows that travel with the request itself (row k feeds decode step k).
            n_bytes: bytes of all embeddings that travel with it, held until the request ends.

        Raises:
            InvalidRequest: the id is in use.
            Overloaded: the budget for embedding rows does not allow it now.
        """
        if request_id in self._streams or request_id in self.requests:
            raise InvalidRequest(f"Request {request_id!r} is already running.")
        self._charge(n_bytes)
        self._streams[request_id] = RowStream(received, complete, n_bytes)

    def push_rows(self, request_id: str, rows: torch.Tensor | None, *, complete: bool) -> None:
        """Append rows [n, width]. Unknown ids are ignored: the request has ended meanwhile.

        Raises:
            InvalidRequest: rows after the last.
            Overloaded: the budget for embedding rows is used up.
        """
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if stream.complete:
            raise InvalidRequest(f"Request {request_id!r} got rows after its input was complete.")
        n_bytes = 0 if rows is None else rows.nbytes
        self._charge(n_bytes)
        stream.held_bytes += n_bytes
        stream.complete = complete
        self._stalled = False
        stream.pending = stream.pending or RowUpdate()
        stream.pending.complete = complete
        if rows is not None and len(rows):
            stream.received += len(rows)
            stream.pending.rows.append(rows)

    def close_stream(self, request_id: str) -> None:
        """Forget a request's rows. Idempotent."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.held_row_bytes -= stream.held_bytes

    def _charge(self, n_bytes: int) -> None:
        if self.held_row_bytes + n_bytes > self.row_budget_bytes:
            raise Overloaded(
                f"Embedding rows held would reach {self.held_row_bytes + n_bytes} bytes; "
                f"the budget is {self.row_budget_bytes}.",
                retry_after=1.0,
            )
        self.held_row_bytes += n_bytes

    def _ready(self, request: Request) -> bool:
        """Whether the input of the request's next step is here. Computed tokens include those in flight."""
        stream = self._streams.get(request.request_id)
        if stream is None or stream.complete:
            return True
        return request.num_computed_tokens - request.num_prompt_tokens < stream.received

    def waits_for_input(self, request_id: str) -> bool:
        """Whether a request goes on only when rows come. False for ids that are not known."""
        request = self.requests.get(request_id)
        return request is not None and not self._ready(request)

    # -- vLLM's interface

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        for request in self.running:
            if not self._ready(request):
                # schedule() advances current_step before it compares, so +2 skips exactly this call. The request keeps
                # its KV blocks but takes no place and no tokens in the batch.
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, self.current_step + 2)
                self.held_steps += 1
        output = super().schedule(*args, **kwargs)
        self._stalled = output.total_num_scheduled_tokens == 0
        updates: dict[str, RowUpdate] = {}
        for request_id, stream in self._streams.items():
            request = self.requests.get(request_id)
            # The worker knows a request once it was scheduled; until then its rows stay here.
            if stream.pending is not None and request is not None and request.num_computed_tokens > 0:
                updates[request_id] = stream.pending
                stream.pending = None
        output.omni_row_updates = updates  # a plain dataclass: the attribute survives in process and pickled
        return output

    def add_request(self, request: Request) -> None:
        self._stalled = False
        super().add_request(request)

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            self._stalled = False
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        # Every way in which a request ends passes here: finished, aborted, failed.
        self.close_stream(request.request_id)
        self._stalled = False
        return super()._free_request(request, *args, **kwargs)

    # -- OmniSchedulerInterface

    def has_runnable(self) -> bool:
        if self._stalled:
            # Requests may wait for the KV blocks or the places of others that themselves wait for rows; until rows come
            # or something ends, another step would find the same.
            return False
        return bool(
            self.finished_req_ids
            or self.get_request_counts()[1] > self.num_waiting_for_streaming_input
            or any(self._ready(request) for request in self.running)
        )

    def omni_counts(self) -> dict[str, int]:
        return {
            "streams": len(self._streams),
            "held": sum(not self._ready(request) for request in self.running),
            "pending_rows": sum(
                len(rows) for stream in self._streams.values() if stream.pending for rows in stream.pending.rows
            ),
            "row_bytes": self.held_row_bytes,
        }


class OmniScheduler(OmniSchedulerMixin, Scheduler):
    """For stages that run one step at a time (CPU)."""


class OmniAsyncScheduler(OmniSchedulerMixin, AsyncScheduler):
    """For stages that schedule a step ahead of the device (CUDA)."""
