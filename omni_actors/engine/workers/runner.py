"""What the model runners of all platforms share: rows that go in and come out of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from msgspec import Struct
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from omni_actors.engine.scheduler import RowUpdate
from omni_actors.engine.workers.base import (
    AttachedOutput,
    BurstOutput,
    BurstRunnerMixin,
    HostCopy,
    OmniRunnerBase,
    burst_of,
    first_step,
)

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces import SupportsEagle3
    from vllm.v1.worker.gpu.model_runner import ExecuteModelState


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


class Emission(Struct, frozen=True):
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


class OmniRunnerMixin(OmniRunnerBase, BurstRunnerMixin):
    """Mixin, in front of vLLM's V2 `GPUModelRunner` (the base class of the CPU runner, too).

    What comes in and goes out besides tokens is up to the model's ModelState: a `StreamedInputState` gets the rows of
    `SchedulerOutput.omni_row_updates`, and an `EmittingState` sees every sampled step.

    Under pipeline parallelism the last rank has the hidden states and emits, the first one takes rows in.
    """

    _burst: Mapping[str, int] = MappingProxyType({})  # of the step that is not sampled yet

    @property
    def _streamed_input(self) -> StreamedInputState | None:
        return self.model_state if isinstance(self.model_state, StreamedInputState) else None

    # -- vLLM's interface

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model; have it return the states of the layers that its ModelState asks for."""
        super().load_model(*args, **kwargs)
        state = self.model_state
        if isinstance(state, EmittingState) and state.aux_layers:
            cast("SupportsEagle3", self.model).set_aux_hidden_state_layers(state.aux_layers)
            self.use_aux_hidden_state_outputs = True

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Add requests to the batch; no penalty applies to a prompt of embeddings without tokens.

        vLLM takes such a prompt for token 0, again and again.
        """
        super().add_requests(scheduler_output)
        new = scheduler_output.scheduled_new_reqs
        slots = [self.req_states.req_id_to_index[request.req_id] for request in new if request.prompt_token_ids is None]
        if slots and self.sampler is not None:
            self.sampler.penalties_state.prompt_bin_mask[slots] = 0

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Pass on rows that arrived for running requests."""
        super().update_requests(scheduler_output)
        updates: dict[str, RowUpdate] = getattr(scheduler_output, "omni_row_updates", {})
        if updates and self._streamed_input is not None:
            for request_id, update in updates.items():
                self._streamed_input.push_rows(request_id, update)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Forget requests that have ended."""
        if isinstance(self.model_state, PerRequestState):
            # vLLM treats preempted requests as finished too; only these have really ended.
            for request_id in scheduler_output.finished_req_ids:
                self.model_state.drop_request(request_id)
        super().finish_requests(scheduler_output)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Compute a step, or the first one of a burst."""
        self._burst = burst_of(scheduler_output)
        if self._burst:
            scheduler_output = first_step(scheduler_output, self._burst)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, and compute the further steps of a burst."""
        forward = self.execute_model_state  # super() clears it
        output = super().sample_tokens(*args, **kwargs)
        if forward is None or output is None:
            return output
        output = self._with_emission(forward, output)
        if not self._burst:
            return output
        further = self.further_steps(self._burst, forward.input_batch)
        return BurstOutput(output, further, self.output_copy_stream)

    def _with_emission(self, forward: ExecuteModelState, output: Any) -> Any:
        """Attach to the output what the model's ModelState makes of the step."""
        state = self.model_state
        if not isinstance(state, EmittingState) or forward.hidden_states is None:
            return output
        step = Step(
            forward.input_batch,
            forward.hidden_states,
            tuple(forward.aux_hidden_states or ()),
            self.req_states.last_sampled_tokens,
        )
        with torch.inference_mode():
            emission = state.emit(step)
        if emission is None or get_tp_group().rank_in_group:
            return output
        copy = HostCopy(emission.tensors, self.output_copy_stream if step.hidden.is_cuda else None)
        return AttachedOutput(output, lambda: emission.split(copy.wait()))

    # -- OmniRunnerBase

    def omni_counts(self) -> dict[str, int]:
        """Requests in the worker, and what the model's ModelState holds for them."""
        counts = {"worker_requests": len(self.req_states.req_id_to_index)}
        if isinstance(self.model_state, PerRequestState):
            counts |= self.model_state.omni_counts()
        return counts

    def omni_reset(self) -> None:
        """Forget the forward pass of a step that failed before it was sampled."""
        self.execute_model_state = None
        self._burst = {}
