"""Scheduling of a stage's requests by vLLM: rows that arrive while a request runs, denoise steps, and memory.

A talker request starts with a few rows of the thinker's output; the rest arrives while it decodes. The scheduler keeps
the rows until the worker knows the request, sends them with the SchedulerOutput, and leaves a request out of the batch
while its next row is missing. Payloads of *new* requests need nothing here: they travel in
`SamplingParams.extra_args["omni"]`, which vLLM passes to the worker untouched.

Requests wait for a place in the order of vLLM's queue, by priority and arrival, and no admitted request is interrupted
for another one. If the KV cache runs out of blocks, the least urgent of the running requests goes back to the queue and
computes everything again later; its rows stay with the worker meanwhile. Admission also waits for the budget of rows
(`rows.py`), in the same order.

Memory is held on two scales. A request keeps what its chunks hand on (keys and values, mel frames) from its first job
to its end; a job keeps its latents from its first step to its end, also while it is deferred. A step needs memory only
while it runs. All of it together stays within the budget:

* A request's first job waits until everything held, with what the request will hold, leaves room for the largest job
  of any request. Later jobs are never refused for what is held, so a request that was admitted can always finish.
* A job waits for its first step until each job in progress could take its most expensive step by itself.
* A step that does not fit next to the others of the same moment is left out of this one.

Every wait is in the order in which the caller asks, and nothing newer is admitted past it. What exceeds the budget by
itself runs alone: the figures are estimates, and refusing the request would not make it smaller.

vLLM's scheduler then provides continuous batching of denoise steps: every step serves all running requests whatever
their step counts, finished requests leave and waiting ones join between any two steps, and a request of one step ends
after one. `DiffusionMixin` adds deadlines (`omni_actors/stage/sound.py`) and a budget of device memory. Requests
without a `DiffusionJob` (`workers/diffusion.py`) are scheduled as vLLM would.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from omni_actors.engine.models import SpeechLimit
from omni_actors.engine.rows import FollowedRows, RowBudget, RowCache, budget_values
from omni_actors.engine.workers.base import DRAFT, mark_burst, omni_options
from omni_actors.engine.workers.diffusion import DiffusionJob, diffusion_entry, diffusion_job
from omni_actors.errors import InvalidRequest
from omni_actors.sharing import Budget
from omni_actors.stage.sound import LONG_STEP_TOKENS, Piece, choose, picture_due
from omni_actors.telemetry.metrics import Metric

if TYPE_CHECKING:
    VllmScheduler = Scheduler
else:
    VllmScheduler = object  # what stands behind the mixin in the order of the base classes


class OmniSchedulerBase(VllmScheduler):
    """What the engines need of a scheduler beyond vLLM's interface.

    It knows whether it is stalled: the last `schedule` found nothing to do, and nothing happened since. And of vLLM's
    `prefill_schedule_interval`, which vLLM itself minds between data-parallel ranks alone: while requests decode, new
    ones are admitted in each such step only, together.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stalled = False
        self._since_admission = 1  # steps, with the one to come

    def _leave_out(self, request: Request) -> None:
        """Leave a running request out of the next `schedule`. It keeps its KV blocks, but takes no place in the batch.

        vLLM's own scheduler for diffusion language models defers in the same way: `schedule` advances `current_step`
        before it compares, so +2 skips exactly one call.
        """
        request.next_decode_eligible_step = max(request.next_decode_eligible_step, self.current_step + 2)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step, and note whether there was anything to do."""
        decode_only = self._since_admission < self.scheduler_config.prefill_schedule_interval
        output: SchedulerOutput = super().schedule(throttle_prefills or decode_only)
        self._since_admission = 1 if output.scheduled_new_reqs else self._since_admission + 1
        self._stalled = not decode_only and output.total_num_scheduled_tokens == 0
        return output

    def add_request(self, request: Request) -> None:
        """Queue a request, which ends a stall."""
        self._stalled = False
        super().add_request(request)

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Take the results of a step; one that computed something ends a stall."""
        if scheduler_output.total_num_scheduled_tokens:
            self._stalled = False
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        # Every request ends here, whether finished, aborted or failed.
        self._stalled = False
        return super()._free_request(request, *args, **kwargs)

    def has_runnable(self) -> bool:
        """Whether a step would do something: compute an unfinished request, or free a finished one in the worker.

        False while requests wait for KV blocks, batch slots or the budget of others that wait for input themselves.
        Until that comes or a request ends, another step would change nothing.
        """
        return not self._stalled and self.has_requests()

    def omni_counts(self) -> dict[str, int]:
        """State held in addition to vLLM's own, by name; all zero when idle."""
        return {}


class RowUpdate(Struct):
    """Rows on their way to the worker, each [n, width] on the CPU; `complete` if they are the last."""

    rows: list[torch.Tensor] = []
    complete: bool = False


class RowStream(Struct):
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


class OmniSchedulerMixin(OmniSchedulerBase):
    """Adds row streams to a vLLM scheduler, only by wrapping `super()`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = RowBudget(omni_options(self.vllm_config).get("budget_bytes", 2 << 30))
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
        self.budget.rows.take(request_id, stream.held_bytes)
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
        if request_id in self.budget.admitted:  # otherwise it waits for others, and rows do not change that
            self._stalled = False
        stream.complete = complete
        stream.pending = stream.pending or RowUpdate()
        stream.pending.complete = complete
        if rows is not None and len(rows):
            self.budget.rows.take(request_id, rows.nbytes)
            stream.received += len(rows)
            stream.pending.rows.append(rows)
        if (request := self.requests.get(request_id)) is not None:
            self._limit_speech(request)

    def _limit_speech(self, request: Request) -> None:
        """Lower `max_tokens` to the longest speech of the text, once all of the text is known."""
        stream, params = self._streams.get(request.request_id), request.sampling_params
        if self.speech_limit is None or stream is None or not stream.complete or params is None or params.ignore_eos:
            return
        longest = self.speech_limit.base + self.speech_limit.per_token * (stream.text_tokens + stream.received)
        request.max_tokens = min(request.max_tokens, max(longest, params.min_tokens))

    def close_stream(self, request_id: str) -> None:
        """Forget a request's rows. Idempotent."""
        if self._streams.pop(request_id, None) is not None:
            self.budget.release(request_id)

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
        self.budget.admitted.update(new.req_id for new in output.scheduled_new_reqs if new.req_id in self._streams)
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
        if (followed := self._followed.get(request.request_id)) is not None and followed.waits():
            return False
        return self._ready(request) and self.budget.admits(request.request_id)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.close_stream(request.request_id)
        self.unfollow(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    # -- OmniSchedulerBase

    def has_runnable(self) -> bool:
        """Whether a step would do something; false while all requests wait for rows."""
        return not self._stalled and bool(
            self.finished_req_ids
            or self.get_request_counts()[1] > self.num_waiting_for_streaming_input
            or any(map(self._ready, self.running))
        )

    def omni_counts(self) -> dict[str, int]:
        """Open streams, requests held back and followed, rows not yet with the worker, and bytes of all rows."""
        return {
            "streams": len(self._streams),
            "held": sum(not self._ready(request) for request in self.requests.values()),
            "pending_rows": sum(
                len(rows) for stream in self._streams.values() if stream.pending for rows in stream.pending.rows
            ),
            "row_bytes": self.budget.rows.used,
            "followed": len(self._followed),
            "waiting_for_budget": self.budget.waiting,
        }


class OmniScheduler(OmniSchedulerMixin, Scheduler):
    """For synchronous scheduling (CPU)."""


class OmniAsyncScheduler(OmniSchedulerMixin, AsyncScheduler):
    """For scheduling a step ahead of the device (CUDA)."""


class Claim(Struct, frozen=True):
    """What a request claims from its first job to its end.

    Args:
        request_id: the same in all of its jobs.
        held_bytes: kept between its jobs (`DiffusionStream.held_bytes`).
        job_bytes: the most that one of its jobs holds and needs in a step.
    """

    request_id: str
    held_bytes: int
    job_bytes: int


class DeviceBudget:
    """Decides which jobs are in the next step.

    For each step: `begin_step`, then in order of precedence `takes` for each job in progress and `admits` for each that
    waits.

    Attributes:
        held: bytes for the requests that were admitted and the jobs in progress.
    """

    def __init__(self, limit: int) -> None:
        self.held = Budget(limit)
        self.step_bytes = 0  # needed by the step that was put together last
        self.deferred = 0  # jobs that it left out for lack of room
        self.deferrals = 0  # jobs left out of all steps so far
        self._claims: dict[str, Claim] = {}
        self._jobs: dict[str, DiffusionJob] = {}
        self._alone = True  # nothing is in the step yet
        self._admits_jobs = True
        self._admits_requests = True

    def begin_step(self) -> None:
        """Forget what the step before needed, but not what is held."""
        self.step_bytes = self.deferred = 0
        self._alone = self._admits_jobs = self._admits_requests = True

    def takes(self, job: DiffusionJob, step: int) -> bool:
        """Whether step number `step`, from 1, of a job in progress fits; if not, no job is admitted in this step."""
        if step > job.num_steps:
            return True  # asynchronous scheduling: its last step is in flight, and it needs no other
        if not self._alone and not self.held.fits(self.step_bytes + job.bytes_at(step)):
            self._admits_jobs = False
            return self._defer()
        return self._take(job, step)

    def admits(self, job_id: str, job: DiffusionJob, claim: Claim | None = None) -> bool:
        """Whether a waiting job can take its first step.

        Args:
            claim: of the request that the job belongs to; None for a job that is a request of its own.
        """
        new = claim if claim is not None and claim.request_id not in self._claims else None
        if not self._admits_jobs or (new is not None and not self._admits_requests):
            return self._defer()
        if new is not None and not self._fits_request(new):
            # Later jobs still go on: what their requests hold is counted already, and only their end makes room.
            self._admits_requests = False
            return self._defer()
        if not self._fits_job(job, new.held_bytes if new is not None else 0):
            self._admits_jobs = False
            return self._defer()
        if new is not None:
            self._claims[new.request_id] = new
            self.held.take(("request", new.request_id), new.held_bytes)
        self._jobs[job_id] = job
        self.held.take(("job", job_id), job.held_bytes)
        return self._take(job, 1)

    def job_ended(self, job_id: str) -> None:
        """Release what a job holds. Idempotent; ignores unknown ids."""
        self._jobs.pop(job_id, None)
        self.held.release(("job", job_id))

    def request_ended(self, request_id: str) -> None:
        """Release what a request keeps between its jobs. Idempotent; ignores unknown ids."""
        self._claims.pop(request_id, None)
        self.held.release(("request", request_id))

    def statistics(self) -> dict[Metric, float]:
        """The figures for the metrics."""
        return budget_values(self.held, self.step_bytes, self.deferred, self.deferrals)

    def _fits_request(self, claim: Claim) -> bool:
        claims = [*self._claims.values(), claim]
        held = sum(each.held_bytes for each in claims)
        return len(claims) == 1 or held + max(each.job_bytes for each in claims) <= self.held.limit

    def _fits_job(self, job: DiffusionJob, claimed: int) -> bool:
        if self._alone and not self._jobs:
            return True
        dearest = max(each.most_bytes for each in (job, *self._jobs.values()))
        needed = max(dearest, self.step_bytes + job.bytes_at(1))
        return self.held.fits(claimed + job.held_bytes + needed)

    def _take(self, job: DiffusionJob, step: int) -> bool:
        self.step_bytes += job.bytes_at(step)
        self._alone = False
        return True

    def _defer(self) -> bool:
        self.deferred += 1
        self.deferrals += 1
        return False


NO_LIMIT = 1 << 62


class DiffusionMixin(OmniSchedulerBase):
    """Schedules jobs by earliest playback deadline, within the memory budget.

    Jobs in progress and waiting ones are in one order, `choose` and `DeviceBudget` decide. A step takes `max_num_seqs`
    jobs, and of those that count tokens as many as have `max_num_batched_tokens` together, or one; others in progress
    keep their latents and skip it. While a long step is computed no other is scheduled, so that who comes meanwhile
    does not wait for another one, too: asynchronous scheduling gains a millisecond or two, nothing beside such a step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = DeviceBudget(omni_options(self.vllm_config).get("budget_bytes", NO_LIMIT))
        self.places: int = self.vllm_config.scheduler_config.max_num_seqs
        self._step_tokens: int = self.vllm_config.scheduler_config.max_num_batched_tokens
        self._by_priority = self.vllm_config.scheduler_config.policy == "priority"
        # vLLM would count jobs that skip a step, so that an urgent one could not enter.
        self.max_num_running_reqs = self.max_num_active_reqs = NO_LIMIT
        self.clock: Callable[[], float] = time.monotonic  # by which jobs are due
        self._chosen: set[str] = set()

    def release(self, request_id: str) -> None:
        """Release what a request, of one job or several, has claimed of the budget. Idempotent; ignores unknown ids."""
        self.budget.request_ended(request_id)
        self._stalled = False

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step of the most urgent jobs that fit the budget."""
        self.budget.begin_step()
        running = {request.request_id for request in self.running}
        unfinished = {request.request_id: request for request in (*self.running, *self.waiting) if _has_step(request)}
        long = sum(map(_tokens_in_flight, self.running)) > LONG_STEP_TOKENS

        tokens = 0  # in the step

        def fits(request_id: str) -> bool:
            nonlocal tokens
            request = unfinished[request_id]
            entry = diffusion_entry(request.sampling_params)
            job: DiffusionJob = entry["diffusion"]
            step = _next_step(request)
            own = job.tokens_at(step)
            # What is left out here is not short of memory, so the budget is not asked: it would hold back all others.
            if tokens and own and tokens + own > self._step_tokens:
                return False
            if request_id in running:
                fitting = self.budget.takes(job, step)
            else:
                fitting = self.budget.admits(request_id, job, entry.get("claim"))
            tokens += own if fitting else 0
            return fitting

        pieces = [] if long else [self._piece(request) for request in unfinished.values()]
        self._chosen = set(choose(pieces, self.clock(), self.places, fits))
        for request in self.running:
            if request.request_id in unfinished and request.request_id not in self._chosen:
                self._leave_out(request)
        return super().schedule(*args, **kwargs)

    def _piece(self, request: Request) -> Piece[str]:
        """The request's job, as `choose` sees it. Jobs that do not say when they are due are due at once."""
        entry = diffusion_entry(request.sampling_params)
        job: DiffusionJob = entry["diffusion"]
        priority = request.priority if self._by_priority else 0
        return Piece(request.request_id, priority, picture_due(entry.get("due", 0.0), job.all_tokens), job.share)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """vLLM calls this for every waiting request that it could admit; False leaves it waiting for this step."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        return request.request_id in self._chosen or diffusion_job(request.sampling_params) is None

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        # Every job ends here, whether finished, aborted or failed. The worker frees it before it computes again.
        self.budget.job_ended(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def omni_counts(self) -> dict[str, int]:
        """Bytes that requests hold and that the last step needed, and jobs deferred in it."""
        budget = self.budget
        return {"held_bytes": budget.held.used, "step_bytes": budget.step_bytes, "deferred": budget.deferred}


def _has_step(request: Request) -> bool:
    """Whether the request is a job with a step to do. The last one may be in flight: asynchronous scheduling."""
    job = diffusion_job(request.sampling_params)
    return job is not None and _next_step(request) <= job.num_steps


def _tokens_in_flight(request: Request) -> int:
    """Tokens of the request's step that the device has not completed; 0 if there is none, or its model counts none."""
    job = diffusion_job(request.sampling_params)
    return job.tokens_at(_next_step(request) - 1) if job is not None and request.num_output_placeholders else 0


def _next_step(request: Request) -> int:
    """The denoise step, from 1, that the request's next scheduled token stands for; its prompt is the first."""
    return max(request.num_computed_tokens - request.num_prompt_tokens + 1, 0) + 1


class DiffusionScheduler(DiffusionMixin, Scheduler):
    """For synchronous scheduling."""


class DiffusionAsyncScheduler(DiffusionMixin, AsyncScheduler):
    """For scheduling a step ahead of the device."""
