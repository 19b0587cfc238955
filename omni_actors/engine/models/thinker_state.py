"""The ModelStates of models whose states a later stage takes: of thinkers, and of encoders.

They know whose states are taken, and where in a prompt media are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from omni_actors.engine.workers.runner import Attachments, Emission, EmittingState, Step, payload_of
from omni_actors.errors import EngineError


@dataclass(frozen=True, slots=True)
class EmitRows:
    """Payload (`extra_args["omni"]`) of a request whose rows a later stage takes."""


class MarkedState(DefaultModelState, EmittingState):
    """Knows the requests that emit something: those with a payload of a class.

    Attributes:
        mark: that class.
        counted_as: what the requests are called where state is counted.
    """

    mark: ClassVar[type]
    counted_as: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._emitting: dict[str, NewRequestData] = {}

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Take a new request, or one that resumes after preemption, into slot `req_index`."""
        super().add_request(req_index, new_req_data)
        if isinstance(payload_of(new_req_data), self.mark):
            self._emitting[new_req_data.req_id] = new_req_data

    def drop_request(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._emitting.pop(request_id, None)

    def omni_counts(self) -> dict[str, int]:
        """Requests that emit something."""
        return {self.counted_as: len(self._emitting)}

    def emitting(self, step: Step) -> list[NewRequestData | None]:
        """The requests of the batch, None for those that emit nothing."""
        return [self._emitting.get(request_id) for request_id in step.batch.req_ids]


class ThinkerState(MarkedState):
    """Knows the requests that emit rows. A family's subclass makes the rows (`emit`)."""

    mark, counted_as = EmitRows, "emitting"

    def media_mask(self, step: Step) -> NDArray[np.bool_] | None:
        """Mask bool [tokens] of the positions that media of emitting requests fill; None if there are none.

        Generated tokens are never among them.
        """
        mask: NDArray[np.bool_] | None = None
        for request, start, first_row, last_row in zip(
            self.emitting(step), step.starts, step.offsets, step.offsets[1:], strict=False
        ):
            end = start + last_row - first_row
            for feature in request.mm_features if request is not None else ():
                place = feature.mm_position
                first, last = max(start, place.offset), min(end, place.offset + place.length)
                if first >= last:
                    continue
                if mask is None:
                    mask = np.zeros(step.batch.num_tokens, dtype=bool)
                filled = np.ones(last - first, dtype=bool)
                if place.is_embed is not None:
                    filled = place.is_embed[first - place.offset : last - place.offset].numpy()
                # Videos with sound have features of two kinds in one place.
                mask[first_row + first - start : first_row + last - start] |= filled
        return mask

    def prompt_positions(self, step: Step, index: int) -> torch.Tensor:
        """M-RoPE positions i64 [3, P] of the prompt of P tokens of an emitting request of the batch."""
        if self.rope_state is None:
            raise EngineError("This model takes media but has no M-RoPE positions; a later stage cannot follow it.")
        length = self._emitting[step.batch.req_ids[index]].prompt_len
        positions = self.rope_state.read_prefill_positions(int(step.batch.idx_mapping_np[index]), length)
        return positions.to(torch.int64, copy=True)


def emission(
    requests: Sequence[NewRequestData | None],
    tensors: Mapping[str, torch.Tensor],
    positions: Mapping[int, torch.Tensor],
    part: Callable[[int, Mapping[str, torch.Tensor]], dict[str, Any]],
) -> Emission:
    """What a step gives to the later stage.

    Args:
        requests: of the batch, None for those that emit nothing.
        tensors: on the device, by name.
        positions: M-RoPE positions of the prompts that have just begun, by place in the batch.
        part: makes of the copies of the tensors what the request at a place gets besides.
    """
    named = {f"positions/{index}": tensor for index, tensor in positions.items()}

    def split(host: Mapping[str, torch.Tensor]) -> Attachments:
        parts: Attachments = [part(index, host) if request else None for index, request in enumerate(requests)]
        for index in positions:
            parts[index] = {**(parts[index] or {}), "mrope_positions": host[f"positions/{index}"]}
        return parts

    return Emission({**tensors, **named}, split)


ENCODED = "encoded"  # name of the states [tokens, width] in a request's attachment


@dataclass(frozen=True, slots=True)
class Encode:
    """Payload (`extra_args["omni"]`) of a sequence to encode."""


class Residual(nn.Module):
    """In the place of a model's last norm, for a tap before it: only the residual is added."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        """The states before the norm."""
        return hidden if residual is None else hidden + residual, None


class EncoderState(MarkedState):
    """Gives the tapped states of the sequences to encode.

    The tap is what the model returns as its last states. A model whose tap lies further down is made without the layers
    above it, so that these are neither loaded nor computed.
    """

    mark, counted_as = Encode, "encoding"

    def tapped(self, hidden: torch.Tensor) -> torch.Tensor:
        """What goes to the next stage of states [tokens, width] that the next replay of a graph will overwrite."""
        return hidden.clone()

    def emit(self, step: Step) -> Emission | None:
        """The states of the positions that the step has computed."""
        requests, offsets = self.emitting(step), step.offsets
        if not any(requests):
            return None

        def part(index: int, host: Mapping[str, torch.Tensor]) -> dict[str, Any]:
            return {ENCODED: host[ENCODED][offsets[index] : offsets[index + 1]]}

        return emission(requests, {ENCODED: self.tapped(step.hidden[: step.batch.num_tokens])}, {}, part)
