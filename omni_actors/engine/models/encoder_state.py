"""The ModelState of encoders: the states of every position that a step computes go to the next stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from omni_actors.engine.models.thinker_state import MarkedState, emission
from omni_actors.engine.workers.runner import Emission, Step

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
