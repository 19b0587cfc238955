"""What our schedulers share: requests are left out of a step, and a step that can do nothing is not repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

if TYPE_CHECKING:
    VllmScheduler = Scheduler
else:
    VllmScheduler = object  # what stands behind the mixin in the order of the base classes


class StallMixin(VllmScheduler):
    """Knows whether the scheduler is stalled: the last `schedule` found nothing to do, and nothing happened since."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stalled = False

    def _leave_out(self, request: Request) -> None:
        """Leave a running request out of the next `schedule`. It keeps its KV blocks, but takes no place in the batch.

        vLLM's own scheduler for diffusion language models defers in the same way: `schedule` advances `current_step`
        before it compares, so +2 skips exactly one call.
        """
        request.next_decode_eligible_step = max(request.next_decode_eligible_step, self.current_step + 2)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step, and note whether there was anything to do."""
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        self._stalled = output.total_num_scheduled_tokens == 0
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
