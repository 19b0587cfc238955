"""Scheduling of diffusion requests: one scheduled token is one denoise step.

vLLM's scheduler then provides continuous batching of denoise steps: every step serves all running requests whatever
their step counts, finished requests leave and waiting ones join between any two steps, and a request of one step ends
after one. This module adds a budget of device memory. Requests without a `DiffusionJob` (see diffusion_runner.py) are
scheduled as vLLM would.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from omni_actors.engine.diffusion_budget import DeviceBudget
from omni_actors.engine.diffusion_runner import diffusion_entry, diffusion_job
from omni_actors.engine.scheduler_base import StallMixin
from omni_actors.engine.worker_base import omni_options

NO_LIMIT = 1 << 62


class DiffusionMixin(StallMixin):
    """Defers diffusion requests for which the device memory of the stage's budget has no room.

    Jobs in progress go first, in order of priority (the engine ranks early chunks before late ones) and then of their
    admission; vLLM asks for those that wait in the order of its queue. `DeviceBudget` decides.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = DeviceBudget(omni_options(self.vllm_config).get("latent_budget_bytes", NO_LIMIT))

    def release(self, request_id: str) -> None:
        """Release what a request, of one job or several, has claimed of the budget. Idempotent; ignores unknown ids."""
        self.budget.request_ended(request_id)
        self._stalled = False

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step, without running requests that do not fit its budget."""
        self.budget.begin_step()
        for request in sorted(self.running, key=lambda request: request.priority):
            job = diffusion_job(request.sampling_params)
            if job is not None and not self.budget.takes(job, _next_step(request)):
                self._leave_out(request)
        return super().schedule(*args, **kwargs)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """vLLM calls this for every waiting request that it could admit; False leaves it waiting for this step."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        entry = diffusion_entry(request.sampling_params)
        job = entry.get("diffusion")
        return job is None or self.budget.admits(request.request_id, job, entry.get("claim"))

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


def _next_step(request: Request) -> int:
    """The denoise step, from 1, that the request's next scheduled token stands for; its prompt is the first."""
    return max(request.num_computed_tokens - request.num_prompt_tokens + 1, 0) + 1


class DiffusionScheduler(DiffusionMixin, Scheduler):
    """For synchronous scheduling."""


class DiffusionAsyncScheduler(DiffusionMixin, AsyncScheduler):
    """For scheduling a step ahead of the device."""
