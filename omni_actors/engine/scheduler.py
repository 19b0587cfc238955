"""Schedulers of autoregressive stages: vLLM's own, plus input that arrives while a request runs.

A talker request starts with a few rows of the thinker's output; the rest arrives while it decodes. The scheduler keeps
the rows until the worker knows the request, sends them with the SchedulerOutput, and leaves a request out of the batch
while its next row is missing. Payloads of *new* requests need nothing here: they travel in
`SamplingParams.extra_args["omni"]`, which vLLM passes to the worker untouched.

Requests wait for a place in the order of vLLM's queue, by priority and arrival, and no admitted request is interrupted
for another one. If the KV cache runs out of blocks, the least urgent of the running requests goes back to the queue and
computes everything again later; its rows stay with the worker meanwhile. Admission also waits for the budget of rows
(`row_budget.py`), in the same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from omni_actors.engine.bursts import DRAFT, mark_burst
from omni_actors.engine.models.registry import SpeechLimit
from omni_actors.engine.row_budget import RowBudget
from omni_actors.engine.row_cache import FollowedRows, RowCache
from omni_actors.engine.scheduler_base import StallMixin
from omni_actors.engine.worker_base import omni_options
from omni_actors.errors import InvalidRequest


@runtime_checkable
class OmniSchedulerInterface(Protocol):
    """The methods that the engine needs beyond vLLM's interface."""

    def has_runnable(self) -> bool:
        """Whether a step would do something; false while all requests wait for input."""
        ...

    def omni_counts(self) -> dict[str, int]:
        """State held in addition to vLLM's own, by name; all zero when idle."""
        ...


@dataclass(slots=True)
class RowUpdate:
    """Rows on their way to the worker, each [n, width] on the CPU; `complete` if they are the last."""

    rows: list[torch.Tensor] = field(default_factory=list)
    complete: bool = False


@dataclass(slots=True)
class RowStream:
    """Streamed input of one request.

    Args:
        received: decode rows so far, those of the request itself included (row k feeds decode step k).
        complete: whether no more will come.
        held_bytes: bytes of the embeddings with which it starts, held until the request ends.
        text_tokens: of a talker, the tokens of the text to speak that are in the prompt; each row is one more.
        pending: rows that the worker does not have yet.
    """

    received: int
    complete: bool
    held_bytes: int
    text_tokens: int = 0
    pending: RowUpdate | None = None


class OmniSchedulerMixin(StallMixin):
    """Adds row streams to a vLLM scheduler, only by wrapping `super()`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = RowBudget(omni_options(self.vllm_config).get("row_budget_bytes", 2 << 30))
        self.steps_per_schedule: int = omni_options(self.vllm_config).get("steps_per_schedule", 1)
        self.speech_limit: SpeechLimit | None = omni_options(self.vllm_config).get("speech_limit")
        self.held_steps = 0  # how often a request was left out of a batch because its input was missing
        self._streams: dict[str, RowStream] = {}
        self.row_cache = RowCache(omni_options(self.vllm_config).get("row_cache_bytes", 0), self.hash_block_size)
        self._followed: dict[str, FollowedRows] = {}

    # -- rows of the prefix cache

    def follow(self, request: Request) -> FollowedRows:
        """Have a request use the prefix cache as far as there are rows; comes before `add_request`."""
        followed = self._followed[request.request_id] = FollowedRows(self.row_cache, request)
        return followed

    def unfollow(self, request_id: str) -> None:
        """Forget such a request. Idempotent."""
        followed = self._followed.pop(request_id, None)
        if followed is not None:
            followed.close()

    def _get_local_prefix_cache_hit(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        blocks, cached, *rest = super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        followed = self._followed.get(request.request_id)
        if followed is not None:
            # A cache of several groups has blocks of several sizes, which cannot be shortened alike.
            simple = len(self.kv_cache_config.kv_cache_groups) == 1 and self.block_size == self.hash_block_size
            usable = followed.use(cached if simple else 0)
            if usable < cached:
                cached = usable
                count = usable // self.block_size
                shortened = tuple(group[:count] for group in blocks.blocks)
                blocks = KVCacheBlocks(shortened) if count else self.kv_cache_manager.empty_kv_cache_blocks
        return (blocks, cached, *rest)

    def _release_promises(self) -> None:
        """Release what requests were to compute that do not run: they were not admitted after all, or interrupted."""
        for request_id in self.row_cache.promising():
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                self.row_cache.release(request_id)

    # -- streams

    def open_stream(self, request_id: str, stream: RowStream) -> None:
        """Register a request's streamed input; comes before `add_request`.

        Raises:
            InvalidRequest: the id is in use.
        """
        if request_id in self._streams or request_id in self.requests:
            raise InvalidRequest(f"Request {request_id!r} is already running.")
        self.budget.open(request_id, stream.held_bytes)
        self._streams[request_id] = stream

    def push_rows(self, request_id: str, rows: torch.Tensor | None, *, complete: bool) -> None:
        """Append rows [n, width]. Ignores unknown ids: the request has ended in the meantime.

        Raises:
            InvalidRequest: the input was complete already.
        """
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if stream.complete:
            raise InvalidRequest(f"Request {request_id!r} got rows after its input was complete.")
        if self.budget.has_admitted(request_id):  # otherwise it waits for others, and rows do not change that
            self._stalled = False
        stream.complete = complete
        stream.pending = stream.pending or RowUpdate()
        stream.pending.complete = complete
        if rows is not None and len(rows):
            self.budget.add(request_id, rows.nbytes)
            stream.received += len(rows)
            stream.pending.rows.append(rows)
        if (request := self.requests.get(request_id)) is not None:
            self._limit_speech(request)

    def _limit_speech(self, request: Request) -> None:
        """Lower `max_tokens` to the longest speech of the text, once all of the text is known."""
        stream, params = self._streams.get(request.request_id), request.sampling_params
        if self.speech_limit is None or stream is None or not stream.complete:
            return
        if params is None or params.ignore_eos:
            return
        longest = self.speech_limit.base + self.speech_limit.per_token * (stream.text_tokens + stream.received)
        request.max_tokens = min(request.max_tokens, max(longest, params.min_tokens))

    def close_stream(self, request_id: str) -> None:
        """Forget a request's rows. Idempotent."""
        if self._streams.pop(request_id, None) is not None:
            self.budget.close(request_id)

    def _ready(self, request: Request) -> bool:
        """Whether the input of the request's next step has arrived."""
        return self._steps_with_input(request) > 0

    def _steps_with_input(self, request: Request) -> float:
        """For how many steps the input of a request has arrived. Computed tokens include those in flight.

        A preempted request has no computed tokens, and its next step computes all tokens that it has, again.
        """
        stream = self._streams.get(request.request_id)
        if stream is None or stream.complete:
            return math.inf
        last = max(request.num_computed_tokens, request.num_tokens - 1)
        return stream.received - (last - request.num_prompt_tokens)

    def waits_for_input(self, request_id: str) -> bool:
        """Whether a request waits for rows. False for unknown ids."""
        request = self.requests.get(request_id)
        return request is not None and not self._ready(request)

    # -- bursts

    def _plan_burst(self, request: Request) -> None:
        """Set for how many steps a running request is scheduled next, by drafts for those after the first."""
        request.spec_token_ids = []
        parameters = request.sampling_params
        if request.is_prefill_chunk or parameters is None:
            return
        had = request.num_computed_tokens + 1 - request.num_prompt_tokens  # with those in flight
        left = request.max_tokens - had
        if left < 1:  # vLLM, for which drafts may be rejected, would schedule it again until the last one is there
            self._leave_out(request)
            return
        # Bursts end at multiples of their length, so that they complete a block of the stage that reads the tokens.
        steps = min(self.steps_per_schedule - had % self.steps_per_schedule, left, self._steps_with_input(request))
        if request.use_structured_output or parameters.num_logprobs is not None:
            steps = 1  # the host has work between two tokens
        request.spec_token_ids = [DRAFT] * (int(steps) - 1)

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Burst placeholders are not speculative tokens; report no statistics for them."""
        return super().make_spec_decoding_stats(*args, **kwargs) if self.steps_per_schedule == 1 else None

    # -- vLLM's interface

    def add_request(self, request: Request) -> None:
        """Queue a request, whose text may be complete already."""
        super().add_request(request)
        self._limit_speech(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step without the requests whose next row is missing, and hand on the rows that came."""
        for request in self.running:
            if not self._ready(request):
                self._leave_out(request)
                self.held_steps += 1
            elif self.steps_per_schedule > 1:
                self._plan_burst(request)
        self.budget.begin_step()
        self._release_promises()
        output = super().schedule(*args, **kwargs)
        if self.steps_per_schedule > 1:
            mark_burst(output)
        for admitted in output.scheduled_new_reqs:
            self.budget.admit(admitted.req_id)
        updates: dict[str, RowUpdate] = {}
        for request_id, stream in self._streams.items():
            known = self.requests.get(request_id)
            # The worker knows a request once it has been scheduled; until then its rows stay here.
            if stream.pending is not None and known is not None and known.num_computed_tokens > 0:
                updates[request_id] = stream.pending
                stream.pending = None
        # A plain dataclass: the attribute is kept in process and when pickled.
        output.omni_row_updates = updates  # type: ignore[attr-defined]
        return output

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """vLLM calls this for every waiting request that it could admit; False leaves it waiting for this step."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        followed = self._followed.get(request.request_id)
        if followed is not None and followed.waits():
            return False
        return self._ready(request) and self.budget.admits(request.request_id)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.close_stream(request.request_id)
        self.unfollow(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    # -- OmniSchedulerInterface

    def has_runnable(self) -> bool:
        """Whether a step would do something; false while all requests wait for rows."""
        if self._stalled:
            # Requests may wait for KV blocks or batch slots of others that wait for rows themselves; until rows come or
            # a request ends, another step would change nothing.
            return False
        return bool(
            self.finished_req_ids
            or self.get_request_counts()[1] > self.num_waiting_for_streaming_input
            or any(self._ready(request) for request in self.running)
        )

    def omni_counts(self) -> dict[str, int]:
        """Open streams, requests held back and followed, rows not yet with the worker, and bytes of all rows."""
        return {
            "streams": len(self._streams),
            "held": sum(not self._ready(request) for request in self.requests.values()),
            "pending_rows": sum(
                len(rows) for stream in self._streams.values() if stream.pending for rows in stream.pending.rows
            ),
            "row_bytes": self.budget.held_bytes,
            "followed": len(self._followed),
            "waiting_for_budget": self.budget.waiting,
        }


class OmniScheduler(OmniSchedulerMixin, Scheduler):
    """For synchronous scheduling (CPU)."""


class OmniAsyncScheduler(OmniSchedulerMixin, AsyncScheduler):
    """For scheduling a step ahead of the device (CUDA)."""
