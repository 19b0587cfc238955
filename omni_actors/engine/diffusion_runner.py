"""The interface between `DiffusionWorker` and a diffusion model.

A diffusion request carries a `DiffusionJob` in `SamplingParams.extra_args["omni"]["diffusion"]`. Only that entry makes
it one, not the stage to which it is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from omni_actors.engine.worker_base import OmniRunnerBase
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.tensors import HostTensor
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest
from omni_actors.stage.lead import Ahead

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

# The two token ids that a diffusion worker "samples": vLLM's scheduler counts the first as a completed denoise step and
# ends a request at the second, by its ordinary stop-token check.
STEP_TOKEN = 0
FAILED_TOKEN = 1


@dataclass(frozen=True)
class DiffusionJob:
    """One validated piece of work of a diffusion model: a request, or a chunk of one.

    Args:
        payload: input of the model's runner, opaque to everything else.
        num_steps: denoise steps to schedule, at least 1; the output comes with the last one.
        step_bytes: device memory in bytes that it needs during a step (activations).
        final_bytes: the same for its last step, which also decodes the latents.
        held_bytes: device memory in bytes that it holds from `add` to `remove` (latents, conditions), in a step or not.
        share: the part that it takes of a step which must be short; see `omni_actors.stage.deadlines.Piece`.
        tokens: of each of its steps in the packed batch; a step takes at most `max_num_batched_tokens` of them, or one
            job. 0 if its steps are not counted like this.
        first_tokens: that its first step computes besides.
        later_tokens: of all steps of the request's jobs after it, as far as they are known.
        reports_progress: tell the client after each step how many are done. Of a request, at most one job does.
        preview: its picture shows one that is not done yet.
    """

    payload: Any
    num_steps: int
    step_bytes: int = 0
    final_bytes: int = 0
    held_bytes: int = 0
    share: float = 0.0
    tokens: int = 0
    first_tokens: int = 0
    later_tokens: int = 0
    reports_progress: bool = False
    preview: bool = False

    @property
    def most_bytes(self) -> int:
        """Bytes needed by its most expensive step, in addition to those held."""
        return max(self.step_bytes, self.final_bytes)

    def bytes_at(self, step: int) -> int:
        """Bytes needed by step number `step`, counted from 1."""
        return self.final_bytes if step >= self.num_steps else self.step_bytes

    def tokens_at(self, step: int) -> int:
        """Tokens of step number `step`, counted from 1."""
        return self.tokens + (self.first_tokens if step == 1 else 0)

    @property
    def all_tokens(self) -> int:
        """Tokens of all its steps, and of the jobs to come."""
        return self.first_tokens + self.tokens * self.num_steps + self.later_tokens


class DiffusionStream(ABC):
    """One request: takes input as it arrives and makes jobs of it, one after the other.

    The engine asks for the next job only after the previous one has ended, so a job may build on what that one left on
    the device.
    """

    @property
    @abstractmethod
    def input_tokens(self) -> int:
        """Length of the input so far, for the usage report."""

    @abstractmethod
    def extend(self, token_ids: Sequence[int], *, complete: bool) -> None:
        """Append input; `complete` if it is the last. Raises `OmniError`, and then takes none of it."""

    def extend_tensor(self, tensor: HostTensor, *, complete: bool) -> None:
        """Append a tensor as input, in models that take any. Raises `OmniError`, and then takes none of it."""
        raise InvalidRequest("This stage takes streamed tokens, not rows.")

    @abstractmethod
    def next_job(self) -> DiffusionJob | None:
        """The next job, or None while its input is missing. Each job is returned once."""

    def ahead(self, sample_rate: int) -> Sequence[Ahead]:
        """The pieces of sound of the jobs that `next_job` has not returned; none if they are not known."""
        return ()

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether all jobs have been returned."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Upper bound of the device memory in bytes that is kept from one job for the next, as known now."""

    @property
    @abstractmethod
    def job_bytes(self) -> int:
        """Upper bound of the device memory in bytes that a job to come holds and needs in a step; 0 if none comes."""

    @abstractmethod
    def close(self) -> None:
        """Free the stream's device memory. None of its jobs is running any more."""


class JobQueue(DiffusionStream):
    """A request whose jobs are known as soon as their input is there.

    Args:
        jobs: one after the other; a subclass may append more.
        held_bytes: device memory that they leave for those after them, at most.
        free: frees it.
    """

    def __init__(
        self, jobs: Iterable[DiffusionJob] = (), held_bytes: int = 0, free: Callable[[], None] = lambda: None
    ) -> None:
        self._jobs = deque(jobs)
        self._held_bytes = held_bytes
        self._free = free

    def next_job(self) -> DiffusionJob | None:
        """The oldest job."""
        return self._jobs.popleft() if self._jobs else None

    @property
    def held_bytes(self) -> int:
        """As the runner said."""
        return self._held_bytes

    @property
    def job_bytes(self) -> int:
        """The most that one of the jobs to come needs, of those that are known."""
        return max((job.held_bytes + job.most_bytes for job in self._jobs), default=0)

    def close(self) -> None:
        """Forget the jobs that are left, and free what the others left."""
        self._jobs.clear()
        self._free()


class KnownJobs(JobQueue):
    """A request all of whose input has come when it starts, so that its jobs are known.

    Args:
        jobs: one after the other.
        input_tokens: length of the input, for the usage report.
        held_bytes: see `JobQueue`; so is `free`.
    """

    def __init__(
        self,
        jobs: Iterable[DiffusionJob],
        input_tokens: int,
        held_bytes: int = 0,
        free: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(jobs, held_bytes, free)
        self._input_tokens = input_tokens

    @property
    def input_tokens(self) -> int:
        """Length of the input."""
        return self._input_tokens

    def extend(self, token_ids: Sequence[int], *, complete: bool) -> None:
        """Ignore a late, empty end of the input; refuse more of it."""
        if token_ids or not complete:
            raise InvalidRequest("This stage takes its input as a whole.")

    @property
    def finished(self) -> bool:
        """Whether all jobs have been returned."""
        return not self._jobs


class SingleJob(KnownJobs):
    """A request that is one job."""

    def __init__(self, job: DiffusionJob, input_tokens: int) -> None:
        super().__init__([job], input_tokens)


def diffusion_entry(sampling_params: SamplingParams | None) -> Mapping[str, Any]:
    """Our part of a request's parameters: `diffusion` and, from the engine, `claim` and `due`. Else empty."""
    if sampling_params is None or not sampling_params.extra_args:
        return {}
    return sampling_params.extra_args.get("omni") or {}


def diffusion_job(sampling_params: SamplingParams | None) -> DiffusionJob | None:
    """The job of a diffusion request; None for every other request."""
    return diffusion_entry(sampling_params).get("diffusion")


@dataclass(frozen=True)
class StepResult:
    """Result of a step for one job: device tensors by name, or an error if it failed.

    With its last step come `audio` f32 [samples], `image` u8 [height, width, 3 or 4] or `latents` (floating-point
    numbers of any shape); with one before, `preview` may show what the latents would become. Tensors of other names are
    for the stages after this one; they come with the last step of a job.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    error: BaseException | None = None


class DiffusionModelRunner(OmniRunnerBase):
    """Holds a diffusion model and the latents of its requests. All calls come from one thread.

    Args:
        vllm_config: the stage's configuration; `model_config.model` names the checkpoint.
        device: where the model and the latents live.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.device = device

    @property
    @abstractmethod
    def facts(self) -> EngineFacts:
        """What the coordinator learns when the stage is ready; read after `load`."""

    @abstractmethod
    def load(self, *, dummy: bool) -> None:
        """Load the weights; with `dummy`, make weights that give finite output instead."""

    @abstractmethod
    def warm_up(self) -> None:
        """Run what a request will run, so that the first request does not wait for initialisation."""

    @abstractmethod
    def open(self, request: StageRequest, inputs: StageInputs) -> DiffusionStream:
        """Check a request and its first input. Raises `OmniError`; keeps no state."""

    @abstractmethod
    def add(self, request_id: str, job: DiffusionJob) -> None:
        """Allocate a job's device memory."""

    @abstractmethod
    def remove(self, request_id: str) -> None:
        """Free a job's device memory. Idempotent; ignores unknown ids."""

    @abstractmethod
    def step(self, request_ids: Sequence[str]) -> Mapping[str, StepResult]:
        """Advance these jobs by one denoise step, in one batch.

        All or nothing: if it raises, no job has advanced, and the worker may try them one by one. The failure of a
        single job goes to its `StepResult`.
        """

    def omni_reset(self) -> None:
        """Do nothing: `step` leaves nothing half done."""
