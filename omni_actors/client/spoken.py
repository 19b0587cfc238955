"""Pipelines that speak the text they are given (`Description.speech`): which they are, and prompts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import soundfile
from numpy.typing import NDArray

from omni_actors.errors import InvalidRequest, MalformedMedia, StageUnavailable
from omni_actors.protocol.client import Description
from omni_actors.protocol.payloads import ADDITIONAL_INFORMATION
from omni_actors.protocol.speech import CLIP, CLIP_RATE, INSTRUCTIONS, LANGUAGE, TRANSCRIPT, SpeechAbility

Clip = tuple[NDArray[numpy.float32], int] | Path | str


def spoken(
    text: str,
    *,
    language: str | None = None,
    instructions: str | None = None,
    clip: Clip | None = None,
    transcript: str | None = None,
) -> dict[str, Any]:
    """Make the prompt of a text to speak; the voice by name is an argument of `submit` and `generate`.

    Args:
        language: one of `describe().speech.languages`, or "auto", which is the default.
        instructions: how to speak, in words.
        clip: a recording of the voice to speak with: (f32 [samples], Hz), or a WAV, FLAC, Ogg or MP3 file.
        transcript: what is said in the recording; the model then keeps the manner of speaking, too.

    Raises:
        InvalidRequest: a transcript without a clip, or samples that are none.
        MalformedMedia: the file cannot be read.
    """
    if transcript is not None and clip is None:
        raise InvalidRequest("transcript: it says what is heard in a clip, and there is none.", field="transcript")
    values: dict[str, Any] = {LANGUAGE: language, INSTRUCTIONS: instructions, TRANSCRIPT: transcript}
    if clip is not None:
        values[CLIP], values[CLIP_RATE] = _recording(clip)
    given = {name: value for name, value in values.items() if value is not None}
    return {"messages": [{"role": "user", "content": text}], ADDITIONAL_INFORMATION: given}


def speech_ability(description: Description) -> SpeechAbility | None:
    """What a pipeline can do if it speaks the text that it is given; `None` if it answers.

    Raises:
        StageUnavailable: that is not known yet, because stages of a pipeline without text still load.
    """
    if description.speech is not None or "text" in description.outputs:
        return description.speech
    ready = {stage.stage for stage in description.stages if stage.state == "ready"}
    missing = [f"{stage.stage} ({stage.state})" for stage in description.stages if stage.stage not in ready]
    if missing:
        raise StageUnavailable(
            f"The pipeline is not ready to speak: {', '.join(missing)}.", hint="Try again when it is ready."
        )
    return None


def _recording(clip: Clip) -> tuple[NDArray[numpy.float32], int]:
    """The samples of a recording, with all channels averaged, and their rate."""
    if isinstance(clip, Path | str):
        try:
            samples, rate = soundfile.read(Path(clip).expanduser(), dtype="float32", always_2d=True)
        except (OSError, soundfile.SoundFileError) as error:
            raise MalformedMedia(f"The clip {str(clip)[:200]!r} cannot be read: {error}.", field=CLIP) from error
        return samples.mean(axis=1), int(rate)
    samples, rate = clip
    samples = numpy.asarray(samples, numpy.float32)
    if samples.ndim != 1 or not len(samples) or not numpy.isfinite(samples).all():
        raise InvalidRequest("The clip must be finite samples of one channel, with their rate.", field=CLIP)
    return samples, rate
