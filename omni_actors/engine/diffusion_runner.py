"""What a diffusion model must offer to run as a stage: the seam between `DiffusionWorker` and the model's own code.

A request of a diffusion stage is a `DiffusionJob` in `SamplingParams.extra_args["omni"]["diffusion"]`. That entry alone
makes it a diffusion request, never the stage it is sent to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from omni_actors.engine.worker_base import OmniRunnerBase
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

# The two token ids that a diffusion worker "samples": the base scheduler counts the first as a denoise step done and
# ends a request at the second through its ordinary stop-token check.
STEP_TOKEN = 0
FAILED_TOKEN = 1


@dataclass(frozen=True)
class DiffusionJob:
    """One validated piece of work of a diffusion model: a request, or a chunk of one.

    Args:
        payload: what the model's runner needs, opaque to everything else.
        num_steps: denoise steps to schedule, at least 1; the output comes with the last one.
        step_bytes: device memory that the request needs while a step computes it (latents, embeddings, activations).
        final_bytes: the same for its last step, which also decodes the latents.
    """

    payload: Any
    num_steps: int
    step_bytes: int = 0
    final_bytes: int = 0

    def bytes_at(self, step: int) -> int:
        """Bytes needed by step number `step`, counted from 1."""
        return self.final_bytes if step >= self.num_steps else self.step_bytes


class DiffusionStream(ABC):
    """One request: takes input as it comes and says what can be computed next, one job after the other.

    The engine asks for the next job only after the one before has ended, so a job may build on what the last one left
    behind on the device.
    """

    @property
    @abstractmethod
    def input_tokens(self) -> int:
        """Length of the input so far, for usage figures."""

    @abstractmethod
    def extend(self, token_ids: Sequence[int], *, complete: bool) -> None:
        """More input; `complete` says that it was the last. Raises `OmniError`; nothing of it counts then."""

    @abstractmethod
    def next_job(self) -> DiffusionJob | None:
        """The next job, None as long as its input is not here. Moves on: each job is given once."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether all jobs have been given."""

    @abstractmethod
    def close(self) -> None:
        """Free what the stream holds on the device. No job of it runs any more."""


def diffusion_job(sampling_params: SamplingParams | None) -> DiffusionJob | None:
    """The job of a diffusion request; None for every other request."""
    if sampling_params is None or not sampling_params.extra_args:
        return None
    return (sampling_params.extra_args.get("omni") or {}).get("diffusion")


@dataclass(frozen=True)
class StepResult:
    """What a step did for a job: tensors on the device after its last step, an error if it failed, else neither."""

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
    def facts(self) -> EngineFacts: ...

    @abstractmethod
    def load(self, *, dummy: bool) -> None:
        """Load the weights; with `dummy`, make weights that give finite output instead."""

    @abstractmethod
    def warm_up(self) -> None:
        """Run once what a request will run, so that the first request does not pay for initialisation."""

    @abstractmethod
    def open(self, request: StageRequest, inputs: StageInputs) -> DiffusionStream:
        """Check a request and what there is of its input. Raises `OmniError`; keeps nothing of the request."""

    @abstractmethod
    def add(self, request_id: str, job: DiffusionJob) -> None:
        """Allocate what the request needs on the device."""

    @abstractmethod
    def remove(self, request_id: str) -> None:
        """Free all of a request. Idempotent; unknown ids are ignored."""

    @abstractmethod
    def step(self, request_ids: Sequence[str]) -> Mapping[str, StepResult]:
        """Advance each of these requests by one denoise step, in one batch.

        All or nothing: when it raises, no request has advanced, so that the worker may try them one by one. A request
        that fails alone is reported in its `StepResult`.
        """

    def omni_reset(self) -> None:
        """Nothing is left half-way: `step` is all or nothing."""
