"""What the talker of Qwen3-Omni is given: the user's turns, and the text of the reply as it comes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData

from omni_actors.engine.models.frame_talker.state import FramePayload, FrameTalkerState
from omni_actors.engine.step_output import payload_of

if TYPE_CHECKING:
    from omni_actors.engine.models.qwen3_omni.talker import Qwen3OmniTalker

HEADER = 3  # tokens that open the assistant's turn
OPENING = 6  # positions between them and the first frame


@dataclass(slots=True)
class TalkerPayload(FramePayload):
    """The worker's part of a new request.

    Args:
        prompt: text ids of the user's turns (U of them) and of the three tokens that open the reply.
        first: text id that the reply begins with; `text` has the others.
        voice: the code that stands for the voice.
        media: the thinker's states [n, thinker's width] at the places of media.
        places: their positions, below U.
        positions: M-RoPE positions i64 [3, U]; None for prompts without images and videos.
    """

    prompt: list[int]
    first: int
    voice: int
    media: torch.Tensor | None = field(default=None, repr=False)  # vLLM prints requests when a step fails
    places: list[int] = field(default_factory=list)
    positions: torch.Tensor | None = field(default=None, repr=False)

    @property
    def length(self) -> int:
        """See `FramePayload.length`."""
        return len(self.prompt) + OPENING


class TalkerState(FrameTalkerState):
    """Adds Qwen3-Omni's prompt, and its positions."""

    model: Qwen3OmniTalker

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """See `FrameTalkerState.add_request`."""
        payload = payload_of(new_req_data)
        # vLLM passes only token ids when it asks the model for positions, so the request's own are left with the model.
        self.model.next_positions = payload.positions if isinstance(payload, TalkerPayload) else None
        try:
            super().add_request(req_index, new_req_data)
        finally:
            self.model.next_positions = None

    @torch.inference_mode()
    def prompt_inputs(self, payload: TalkerPayload) -> torch.Tensor:
        """The inputs of the prompt's positions [length, width], as the table in `talker.py` says."""
        model, config = self.model, self.model.config
        ids = [*payload.prompt, *[config.text_pad] * 4, config.text_bos, payload.first]
        rows = model.text_table[async_tensor_h2d(ids, device=self.device, dtype=torch.int64)]
        if payload.media is not None:
            places = async_tensor_h2d(payload.places, device=self.device, dtype=torch.int64)
            rows[places] = model.hidden_projection(payload.media.to(self.device, self.dtype))
        codes = [*config.codec_start, payload.voice, config.codec_pad, config.codec_bos]
        opening = async_tensor_h2d(codes, device=self.device, dtype=torch.int64)
        rows[-OPENING:] += model.embed_input_ids(opening)
        return rows
