"""The ModelState of encoders: the states of every position that a step computes go to the next stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from omni_actors.engine.workers.runner import Attachments, Emission, EmittingState, Step, payload_of

ENCODED = "encoded"  # name of the states [tokens, width] in a request's attachment


@dataclass(frozen=True, slots=True)
class Encode:
    """Payload (`extra_args["omni"]`) of a sequence to encode."""


class Residual(nn.Module):
    """In the place of a model's last norm, for a tap before it: only the residual is added."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        """The states before the norm."""
        return hidden if residual is None else hidden + residual, None


class EncoderState(DefaultModelState, EmittingState):
    """Gives the tapped states of the sequences to encode.

    The tap is what the model returns as its last states. A model whose tap lies further down is made without the layers
    above it, so that these are neither loaded nor computed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._encoding: set[str] = set()

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Take a new request, or one that resumes after preemption, into slot `req_index`."""
        super().add_request(req_index, new_req_data)
        if isinstance(payload_of(new_req_data), Encode):
            self._encoding.add(new_req_data.req_id)

    def drop_request(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._encoding.discard(request_id)

    def omni_counts(self) -> dict[str, int]:
        """Sequences that are being encoded."""
        return {"encoding": len(self._encoding)}

    def tapped(self, hidden: torch.Tensor) -> torch.Tensor:
        """What goes to the next stage of states [tokens, width] that the next replay of a graph will overwrite."""
        return hidden.clone()

    def emit(self, step: Step) -> Emission | None:
        """The states of the positions that the step has computed."""
        names = list(step.batch.req_ids)
        if self._encoding.isdisjoint(names):
            return None
        offsets, encoding = step.offsets, self._encoding & set(names)

        def split(host: Mapping[str, torch.Tensor]) -> Attachments:
            return [
                {ENCODED: host[ENCODED][offsets[index] : offsets[index + 1]]} if name in encoding else None
                for index, name in enumerate(names)
            ]

        return Emission({ENCODED: self.tapped(step.hidden[: step.batch.num_tokens])}, split)
