"""Scheduling of diffusion requests: one scheduled token is one denoise step.

vLLM's scheduler then gives continuous batching at the level of steps for nothing: every step serves all running
requests whatever their step counts, a finished one leaves and a waiting one joins between any two steps, and a request
of one step is over after one. What is added here are two limits of what a step works on: bytes, as memory is finite,
and the model's own unit of work (`DiffusionJob.work`), as everybody on the device waits for a step that has begun.
Requests without a `DiffusionJob` (see diffusion_runner.py) are never touched.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from omni_actors.engine.diffusion_runner import DiffusionJob, diffusion_job
from omni_actors.engine.worker_base import omni_options

NO_LIMIT = 1 << 62


class DiffusionMixin:
    """Defers diffusion requests whose next step does not fit the limits of this step.

    Running requests are considered in the order of their priority, then of their admission, so whoever is deferred is
    overtaken only by more urgent and by older ones; new requests are admitted in order, and none while a running one is
    deferred, unless it is more urgent. A request that alone exceeds a limit runs alone: the bytes are an estimate, and
    refusing the request would not make it smaller.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = omni_options(self.vllm_config)
        self.latent_budget_bytes: int = options.get("latent_budget_bytes", NO_LIMIT)
        self.step_work: int = (options.get("decode") or {}).get("step_blocks") or NO_LIMIT
        # Of the diffusion requests of the step that is being scheduled.
        self.latent_bytes = 0
        self.work = 0
        self.deferred = 0  # diffusion requests deferred so far, for metrics and tests
        self._most_urgent_deferred: int | None = None
        self._least_urgent_running: int | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.latent_bytes = self.work = 0
        self._most_urgent_deferred = self._least_urgent_running = None
        # sorted() keeps the order of equals, which is that of admission.
        for request in sorted(self.running, key=_urgency):
            job = diffusion_job(request.sampling_params)
            if job is None:
                continue
            if self._fits(request, job, self.step_work):
                self._least_urgent_running = _urgency(request)
            else:
                # schedule() first advances current_step, then compares: + 2 skips this one call. vLLM's own scheduler
                # for diffusion language models defers in the same way.
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, self.current_step + 2)
        return super().schedule(*args, **kwargs)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """vLLM asks this of every waiting request that it is about to admit; False leaves it waiting for a step."""
        job = diffusion_job(request.sampling_params)
        if job is None:
            return super()._handle_blocked_waiting_request(request)
        urgency = _urgency(request)
        overtakes = self._most_urgent_deferred is not None and urgency >= self._most_urgent_deferred
        if overtakes or not super()._handle_blocked_waiting_request(request):
            return False
        # Who is more urgent than one that runs takes its place from the next step on; this one step is longer.
        takes_a_place = self._least_urgent_running is not None and urgency < self._least_urgent_running
        return self._fits(request, job, NO_LIMIT if takes_a_place else self.step_work)

    def _fits(self, request: Request, job: DiffusionJob, step_work: int) -> bool:
        """Reserve what `job` needs in this step; if it does not fit, admit none that is less urgent in this step."""
        step = _next_step(request)
        needed = job.bytes_at(step)
        if step > job.num_steps:
            # Asynchronous scheduling: its last step is still in flight and the latents are still held.
            self.latent_bytes += job.step_bytes
            return True
        too_much = self.latent_bytes + needed > self.latent_budget_bytes or self.work + job.work > step_work
        if self.latent_bytes and too_much:
            if self._most_urgent_deferred is None:  # they come in the order of their urgency
                self._most_urgent_deferred = _urgency(request)
            self.deferred += 1
            return False
        self.latent_bytes += needed
        self.work += job.work
        return True

    def has_runnable(self) -> bool:
        """Whether a step would do something: a request is not finished, or the worker has to free one that is."""
        return self.has_requests()

    def omni_counts(self) -> dict[str, int]:
        """Nothing is held beside vLLM's own state."""
        return {}


def _urgency(request: Request) -> int:
    """Less is more urgent."""
    return request.priority


def _next_step(request: Request) -> int:
    """The denoise step, from 1, that the request's next scheduled token stands for; its prompt is the first."""
    return max(request.num_computed_tokens - request.num_prompt_tokens + 1, 0) + 1


class DiffusionScheduler(DiffusionMixin, Scheduler):
    """For synchronous scheduling."""


class DiffusionAsyncScheduler(DiffusionMixin, AsyncScheduler):
    """For scheduling a step ahead of the device."""
