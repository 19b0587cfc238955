"""Recordings as the prompt stage of a model that writes them down prepares them, in the process of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.prompt import PromptEngine
from omni_actors.protocol.fields import DType, HostTensor, TensorRef
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt, StageParams
from omni_actors.stage.engine_interface import ErrorEvent, StageInputs, StageRequest, StreamEvent

RATE = 16_000
RANDOM = np.random.default_rng(0)


def noise(seconds: float) -> np.ndarray:
    """Samples f32 at 16 kHz."""
    return (RANDOM.standard_normal(round(seconds * RATE)) * 0.1).astype(np.float32)


def recording_prompt(sound: np.ndarray, about: str = "", *more: ChatMessage) -> Prompt:
    """A prompt with a recording, and with what it may be about."""
    system = (ChatMessage("system", (ContentPart(text=about),)),) if about else ()
    messages = (*system, ChatMessage("user", (ContentPart(media=0),)), *more)
    ref = TensorRef(0, DType.F32, sound.shape)
    return Prompt(messages=messages, media=(Media("audio", MediaEncoding.ARRAY, ref, sample_rate=RATE),))


class RecordingPrompts:
    """The prompt stage of a checkpoint."""

    def __init__(self, checkpoint: Path, options: Mapping[str, Any]) -> None:
        self.engine = PromptEngine(
            OmniEngineArgs(OmniModelConfig(str(checkpoint), "thinker"), "prompt", {"dtype": "float32", **options})
        )

    def made(self, prompt: Prompt, arrays: Sequence[np.ndarray], **information: Any) -> StageInputs:
        """What it makes of a prompt and the arrays of its media for the stage after it. Raises its error."""
        kinds = {np.dtype(np.uint8): DType.U8, np.dtype(np.float32): DType.F32}
        media = [HostTensor(kinds[each.dtype], each.shape, each.tobytes()) for each in arrays]
        request = StageRequest("prompt", StageParams(), 0, information=information)
        self.engine.start(request, StageInputs(prompt=prompt, media=media))
        events = []
        while self.engine.runnable() or self.engine.busy():
            events += self.engine.step()
        if isinstance(events[0], ErrorEvent):
            raise events[0].error
        assert isinstance(events[0], StreamEvent)
        return StageInputs(token_ids=events[0].token_ids, tensors=events[0].tensors)

    def of(self, sound: np.ndarray, about: str = "", language: str | None = None) -> StageInputs:
        """What it makes of a recording."""
        return self.made(recording_prompt(sound, about), [sound], **({"language": language} if language else {}))
