"""The rows that the talker of Qwen2.5-Omni takes from its thinker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData

from omni_actors.engine.models.thinker_state import ThinkerState
from omni_actors.engine.step_output import Attachments, Emission, Step

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces_base import VllmModel


class Qwen2_5OmniThinkerState(ThinkerState):
    """Emits one row [width] for each computed position: last hidden state + token embedding.

    At places that media fill there is no embedding, and where a prompt came as embeddings it is the given one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unplaced: set[str] = set()  # requests with media whose M-RoPE positions were not emitted yet

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Take a new request, or one that resumes after preemption."""
        super().add_request(req_index, new_req_data)
        if new_req_data.mm_features:
            self._unplaced.add(new_req_data.req_id)

    def drop_request(self, request_id: str) -> None:
        """Forget a request that has ended."""
        super().drop_request(request_id)
        self._unplaced.discard(request_id)

    def emit(self, step: Step) -> Emission | None:
        """The rows of the step; with the first of a prompt that has media also its M-RoPE positions.

        The first need not be those of the first position, which may come from the prefix cache.
        """
        requests = self.emitting(step)
        if not any(requests):
            return None
        n_tokens = step.batch.num_tokens  # without the padding of CUDA graphs
        embeddings = cast("VllmModel", self.model).embed_input_ids(step.batch.input_ids[:n_tokens])
        self._put_given(embeddings, step)
        media = self.media_mask(step)
        if media is not None:
            embeddings = embeddings.masked_fill(async_tensor_h2d(media, device=self.device).unsqueeze(-1), 0)
        # A new tensor, so that the next replay of a graph, which reuses the static hidden states, cannot overwrite it.
        tensors = {"rows": step.hidden[:n_tokens] + embeddings}
        for index, request in enumerate(requests):
            if request is not None and request.req_id in self._unplaced:
                self._unplaced.remove(request.req_id)
                tensors[f"positions/{index}"] = self.prompt_positions(step, index)

        def split(host: Mapping[str, torch.Tensor]) -> Attachments:
            parts: Attachments = []
            for index, request in enumerate(requests):
                if request is None:
                    parts.append(None)
                    continue
                rows = host["rows"][step.offsets[index] : step.offsets[index + 1]]
                part = {"start": step.starts[index], "rows": rows}
                if (positions := host.get(f"positions/{index}")) is not None:
                    part["mrope_positions"] = positions
                parts.append(part)
            return parts

        return Emission(tensors, split)

    def _put_given(self, embeddings: torch.Tensor, step: Step) -> None:
        """Put embeddings that came with a prompt in the place of those of its tokens, in `embeddings` [n_tokens, H]."""
        for index, request in enumerate(self.emitting(step)):
            given = request.prompt_embeds if request is not None else None
            start, first, last = step.starts[index], step.offsets[index], step.offsets[index + 1]
            if given is not None and start < len(given):
                rows = given[start : start + last - first]
                on_device = async_tensor_h2d(rows, device=embeddings.device, dtype=embeddings.dtype)
                embeddings[first : first + len(rows)] = on_device
