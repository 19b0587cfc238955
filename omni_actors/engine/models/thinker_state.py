"""What the ModelStates of thinkers share: whose rows a later stage takes, and where in a prompt media are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from omni_actors.engine.workers.runner import EmittingState, Step, payload_of
from omni_actors.errors import EngineError


@dataclass(frozen=True, slots=True)
class EmitRows:
    """Payload (`extra_args["omni"]`) of a request whose rows a later stage takes."""


class ThinkerState(DefaultModelState, EmittingState):
    """Knows the requests that emit rows. A family's subclass makes the rows (`emit`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._emitting: dict[str, NewRequestData] = {}

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Take a new request, or one that resumes after preemption, into slot `req_index`."""
        super().add_request(req_index, new_req_data)
        if isinstance(payload_of(new_req_data), EmitRows):
            self._emitting[new_req_data.req_id] = new_req_data

    def drop_request(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._emitting.pop(request_id, None)

    def omni_counts(self) -> dict[str, int]:
        """Requests that emit rows."""
        return {"emitting": len(self._emitting)}

    def emitting(self, step: Step) -> list[NewRequestData | None]:
        """The requests of the batch, None for those that emit nothing."""
        return [self._emitting.get(request_id) for request_id in step.batch.req_ids]

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
