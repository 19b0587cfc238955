"""Scheduling of diffusion requests: one scheduled token is one denoise step.

vLLM's scheduler then provides continuous batching of denoise steps: every step serves all running requests whatever
their step counts, finished requests leave and waiting ones join between any two steps, and a request of one step ends
after one. This module adds a budget of bytes per step. Requests without a `DiffusionJob` (see diffusion_runner.py) are
scheduled as vLLM would.
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
    """Defers diffusion requests whose next step does not fit the byte budget of this step.

    First come, first served, without starvation: running requests are considered in the order of their admission, so
    only older requests overtake a deferred one; new requests are admitted in order, and none while an older request is
    deferred. A request that exceeds the budget by itself runs alone: the budget is an estimate, and refusing the
    request would not make it smaller.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.latent_budget_bytes: int = omni_options(self.vllm_config).get("latent_budget_bytes", NO_LIMIT)
        self.latent_bytes = 0  # needed by the diffusion requests of the step that is being scheduled
        self.deferred = 0  # diffusion requests deferred so far, for metrics and tests
        self._admitting = True

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.latent_bytes = 0
        self._admitting = True
        for request in self.running:
            job = diffusion_job(request.sampling_params)
            if job is not None and not self._fits(job, _next_step(request)):
                # schedule() advances current_step before it compares, so +2 skips exactly this call. vLLM's own
                # scheduler for diffusion language models defers in the same way.
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, self.current_step + 2)
        return super().schedule(*args, **kwargs)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """vLLM calls this for every waiting request that it could admit; False leaves it waiting for this step."""
        job = diffusion_job(request.sampling_params)
        if job is None:
            return super()._handle_blocked_waiting_request(request)
        if not self._admitting or not super()._handle_blocked_waiting_request(request):
            return False
        return self._fits(job, _next_step(request))

    def _fits(self, job: DiffusionJob, step: int) -> bool:
        """Reserve what `job` needs in this step; if it does not fit, admit no new request in this step."""
        needed = job.bytes_at(step)
        if step > job.num_steps:
            # Asynchronous scheduling: its last step is still in flight and the latents are still held.
            self.latent_bytes += job.step_bytes
            return True
        if self.latent_bytes and self.latent_bytes + needed > self.latent_budget_bytes:
            self._admitting = False
            self.deferred += 1
            return False
        self.latent_bytes += needed
        return True

    def has_runnable(self) -> bool:
        """Whether a step would do something: compute an unfinished request, or free a finished one in the worker."""
        return self.has_requests()

    def omni_counts(self) -> dict[str, int]:
        """Nothing is held in addition to vLLM's own state."""
        return {}


def _next_step(request: Request) -> int:
    """The denoise step, from 1, that the request's next scheduled token stands for; its prompt is the first."""
    return max(request.num_computed_tokens - request.num_prompt_tokens + 1, 0) + 1


class DiffusionScheduler(DiffusionMixin, Scheduler):
    """For synchronous scheduling."""


class DiffusionAsyncScheduler(DiffusionMixin, AsyncScheduler):
    """For scheduling a step ahead of the device."""
