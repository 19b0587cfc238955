"""What a stage can do that speaks a given text, and what a request may tell it besides the text and the voice."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from omni_actors.protocol.fields import Name

# Names of the additional information (`EngineFacts.wants_information`) of such a stage.
LANGUAGE = "language"  # text: one of `SpeechAbility.languages`, in any case, or `AUTO`
INSTRUCTIONS = "instructions"  # text: how to speak, or which voice to make up
CLIP = "clip"  # f32 [samples], mono, within -1..1: the voice to speak with
CLIP_RATE = "clip_rate"  # Hz
TRANSCRIPT = "transcript"  # text: what is said in the clip
AUTO = "auto"  # the model finds the language out by itself
SPEECH_INFORMATION = (LANGUAGE, INSTRUCTIONS, CLIP, CLIP_RATE, TRANSCRIPT)

Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class SpeechAbility(Struct, frozen=True, forbid_unknown_fields=True):
    """The abilities of a stage that speaks the text that it is given.

    Args:
        languages: those that can be asked for; the model finds the language out by itself otherwise.
        instructions: whether a request may or must say in words how to speak.
        clip: whether a request must bring a recording of the voice to speak with.
        min_clip_seconds: the shortest recording that shows a voice.
        max_clip_seconds: the longest recording.
    """

    languages: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    instructions: Literal["none", "optional", "required"] = "none"
    clip: Literal["none", "required"] = "none"
    min_clip_seconds: Seconds = 0.5
    max_clip_seconds: Seconds = 30.0
