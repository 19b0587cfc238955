"""What the talker of Qwen3-TTS is given."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from omni_actors.engine.models.frame_talker.state import FramePayload, FrameTalkerState
from omni_actors.engine.models.qwen3_tts.prompt import NO_CODE, PromptLayout


@dataclass(slots=True)
class TextTalkerPayload(FramePayload):
    """The worker's part of a new request.

    Args:
        layout: of the prompt.
        voice: f32 [width], what the speaker encoder makes of a clip.
        clip: i64 [frames, G], the codes of a clip that is continued.
    """

    layout: PromptLayout
    voice: torch.Tensor | None = field(default=None, repr=False)
    clip: torch.Tensor | None = field(default=None, repr=False)

    @property
    def length(self) -> int:
        """See `FramePayload.length`."""
        return len(self.layout.texts)


class TextTalkerState(FrameTalkerState):
    """Adds Qwen3-TTS's prompt."""

    @torch.inference_mode()
    def prompt_inputs(self, payload: TextTalkerPayload) -> torch.Tensor:
        """The inputs of the prompt's positions [length, width], as the table in `prompt.py` says."""
        model, layout = self.model, payload.layout
        rows = model.text_table[async_tensor_h2d(layout.texts, device=self.device, dtype=torch.int64)]
        codes = async_tensor_h2d(layout.codes, device=self.device, dtype=torch.int64)
        embedded = model.embed_input_ids(codes.clamp(min=0))
        rows[-len(codes) :] += embedded.masked_fill_((codes == NO_CODE).unsqueeze(1), 0)
        if payload.voice is not None:
            rows[layout.voice_at] += payload.voice.to(self.device, self.dtype)
        if payload.clip is not None:
            clip = payload.clip.to(self.device)
            summed = model.code_predictor.embed(clip[:, 1:], model.embed_input_ids(clip[:, 0]))
            rows[layout.clip_at : layout.clip_at + len(clip)] += summed
        return rows
