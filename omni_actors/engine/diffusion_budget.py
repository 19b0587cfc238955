"""The device memory that a diffusion stage holds and computes with, and who waits when it is used up: pure arithmetic.

Memory is held on two scales. A request keeps what its chunks hand on (keys and values, mel frames) from its first job
to its end; a job keeps its latents from its first step to its end, also while it is deferred. A step needs memory only
while it runs. All of it together stays within the budget:

* A request's first job waits until everything held, with what the request will hold, leaves room for the largest job
  of any request. Later jobs are never refused for what is held, so a request that was admitted can always finish.
* A job waits for its first step until each job in progress could take its most expensive step by itself.
* A step that does not fit next to the others of the same moment is left out of this one.

Every wait is in the order in which the caller asks, and nothing newer is admitted past it. What exceeds the budget by
itself runs alone: the figures are estimates, and refusing the request would not make it smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni_actors.engine.diffusion_runner import DiffusionJob
from omni_actors.stage.engine_interface import BudgetStatistics


@dataclass(frozen=True)
class Claim:
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

    Args:
        limit_bytes: the budget.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.step_bytes = 0  # needed by the step that was put together last
        self.deferred = 0  # jobs that it left out for lack of room
        self.deferrals = 0  # jobs left out of all steps so far
        self._claims: dict[str, Claim] = {}
        self._jobs: dict[str, DiffusionJob] = {}
        self._alone = True  # nothing is in the step yet
        self._admits_jobs = True
        self._admits_requests = True

    @property
    def held_bytes(self) -> int:
        """Bytes held for the requests that were admitted and the jobs in progress."""
        return sum(claim.held_bytes for claim in self._claims.values()) + sum(
            job.held_bytes for job in self._jobs.values()
        )

    def begin_step(self) -> None:
        """Forget what the step before needed, but not what is held."""
        self.step_bytes = self.deferred = 0
        self._alone = self._admits_jobs = self._admits_requests = True

    def takes(self, job: DiffusionJob, step: int) -> bool:
        """Whether step number `step`, from 1, of a job in progress fits; if not, no job is admitted in this step."""
        if step > job.num_steps:
            return True  # asynchronous scheduling: its last step is in flight, and it needs no other
        if not self._alone and self.held_bytes + self.step_bytes + job.bytes_at(step) > self.limit_bytes:
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
        self._jobs[job_id] = job
        return self._take(job, 1)

    def job_ended(self, job_id: str) -> None:
        """Release what a job holds. Idempotent; ignores unknown ids."""
        self._jobs.pop(job_id, None)

    def request_ended(self, request_id: str) -> None:
        """Release what a request keeps between its jobs. Idempotent; ignores unknown ids."""
        self._claims.pop(request_id, None)

    def statistics(self) -> BudgetStatistics:
        """The figures for the metrics."""
        return BudgetStatistics(self.limit_bytes, self.held_bytes, self.step_bytes, self.deferred, self.deferrals)

    def _fits_request(self, claim: Claim) -> bool:
        claims = [*self._claims.values(), claim]
        held = sum(each.held_bytes for each in claims)
        return len(claims) == 1 or held + max(each.job_bytes for each in claims) <= self.limit_bytes

    def _fits_job(self, job: DiffusionJob, claimed: int) -> bool:
        if self._alone and not self._jobs:
            return True
        dearest = max(each.most_bytes for each in (job, *self._jobs.values()))
        needed = max(dearest, self.step_bytes + job.bytes_at(1))
        return self.held_bytes + claimed + job.held_bytes + needed <= self.limit_bytes

    def _take(self, job: DiffusionJob, step: int) -> bool:
        self.step_bytes += job.bytes_at(step)
        self._alone = False
        return True

    def _defer(self) -> bool:
        self.deferred += 1
        self.deferrals += 1
        return False
