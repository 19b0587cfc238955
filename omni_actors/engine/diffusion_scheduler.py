"""Scheduling of diffusion requests: one scheduled token is one denoise step.

vLLM's scheduler then provides continuous batching of denoise steps: every step serves all running requests whatever
their step counts, finished requests leave and waiting ones join between any two steps, and a request of one step ends
after one. This module adds deadlines (`omni_actors/stage/deadlines.py`) and a budget of device memory. Requests without
a `DiffusionJob` (see diffusion_runner.py) are scheduled as vLLM would.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from omni_actors.engine.diffusion_budget import DeviceBudget
from omni_actors.engine.diffusion_runner import DiffusionJob, diffusion_entry, diffusion_job
from omni_actors.engine.scheduler_base import StallMixin
from omni_actors.engine.worker_base import omni_options
from omni_actors.stage.deadlines import LONG_STEP_TOKENS, Piece, choose, picture_due

NO_LIMIT = 1 << 62


class DiffusionMixin(StallMixin):
    """Schedules jobs by earliest playback deadline, within the memory budget.

    Jobs in progress and waiting ones are in one order, `choose` and `DeviceBudget` decide. A step takes `max_num_seqs`
    jobs, and of those that count tokens as many as have `max_num_batched_tokens` together, or one; others in progress
    keep their latents and skip it. While a long step is computed no other is scheduled, so that who comes meanwhile
    does not wait for another one, too: asynchronous scheduling gains a millisecond or two, nothing beside such a step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = DeviceBudget(omni_options(self.vllm_config).get("latent_budget_bytes", NO_LIMIT))
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

    def has_runnable(self) -> bool:
        """Whether a step would do something: compute an unfinished request, or free a finished one in the worker.

        False while requests wait for the budget, and what uses it up waits for input.
        """
        return not self._stalled and self.has_requests()

    def omni_counts(self) -> dict[str, int]:
        """Bytes that requests hold and that the last step needed, and jobs deferred in it."""
        budget = self.budget
        return {"held_bytes": budget.held_bytes, "step_bytes": budget.step_bytes, "deferred": budget.deferred}


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
