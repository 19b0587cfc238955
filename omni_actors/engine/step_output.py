"""What a model does around a step, declared by its ModelState: rows that come in, and what a later stage gets of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from omni_actors.engine.scheduler import RowUpdate
from omni_actors.engine.worker_base import AttachedOutput, HostCopy

Attachments = list[dict[str, Any] | None]  # one entry per request, in the order of the batch


def payload_of(request: NewRequestData) -> Any:
    """`extra_args["omni"]` of a new request; None for vLLM's own warm-up requests."""
    parameters = request.sampling_params
    return (parameters.extra_args or {}).get("omni") if parameters is not None else None


@dataclass(frozen=True)
class Step:
    """A step of the model that has been sampled.

    Args:
        hidden: the last layer's states after its norm [n >= tokens, width]. CUDA graphs write to them again: copy what
            is kept.
        aux: states [n, width] of the layers that `EmittingState.aux_layers` names, in its order; likewise.
        sampled: the last sampled token of every slot, i64 [slots, 1].
    """

    batch: InputBatch
    hidden: torch.Tensor
    aux: Sequence[torch.Tensor]
    sampled: torch.Tensor

    @cached_property
    def starts(self) -> list[int]:
        """The first position that the step computed, by request of the batch."""
        starts: list[int] = self.batch.num_computed_tokens_np[: self.batch.num_reqs].tolist()
        return starts

    @cached_property
    def offsets(self) -> list[int]:
        """The first row of each request in the tensors of the step, and the number of all rows."""
        offsets: list[int] = self.batch.query_start_loc_np[: self.batch.num_reqs + 1].tolist()
        return offsets


@dataclass(frozen=True, slots=True)
class Emission:
    """What a step gives to a later stage.

    Args:
        tensors: on the device, by name; nothing writes to them again.
        split: makes of their copies on the host what each request of the batch gets.
    """

    tensors: Mapping[str, torch.Tensor]
    split: Callable[[Mapping[str, torch.Tensor]], Attachments]


class PerRequestState(ABC):
    """A ModelState that holds something for requests beyond their time in the batch."""

    @abstractmethod
    def drop_request(self, request_id: str) -> None:
        """Forget a request that has ended (and was not merely preempted). Ignores unknown ids."""

    @abstractmethod
    def omni_counts(self) -> dict[str, int]:
        """State held for requests, by name; all zero when idle."""


class StreamedInputState(PerRequestState):
    """A ModelState whose requests receive rows while they run."""

    @abstractmethod
    def push_rows(self, request_id: str, update: RowUpdate) -> None:
        """Take the rows that arrived since the last step."""


class EmittingState(PerRequestState):
    """A ModelState that computes something after sampling, or gives a later stage more than the sampled tokens.

    Attributes:
        aux_layers: layers whose states `Step.aux` has. Layer k stands for the input of layer k, before its norm; the
            model then has vLLM's `set_aux_hidden_state_layers`.
    """

    aux_layers: tuple[int, ...] = ()

    @abstractmethod
    def emit(self, step: Step) -> Emission | None:
        """Work on a sampled step; under tensor parallelism, all ranks do, and the output of the first one counts."""


class EmittedOutput(AttachedOutput):
    """vLLM's output of a step together with what the model's `EmittingState` gave."""

    def __init__(
        self,
        inner: AsyncModelRunnerOutput | ModelRunnerOutput,
        emission: Emission,
        copy_stream: torch.cuda.Stream | None,
    ) -> None:
        super().__init__(inner)
        self._copy = HostCopy(emission.tensors, copy_stream)
        self._split = emission.split

    def attachments(self) -> Attachments:
        """Wait for the copies; give every request its part."""
        return self._split(self._copy.wait())
