"""The route /v1/audio/speech: a model speaks a text.

A pipeline of a speech model speaks the text that it is given (`Description.speech`). One that answers has no stage for
that: its model is asked to repeat the text and speaks its own answer, which is nearly always the same. The events of
`stream_format: "sse"` contain the text that was really spoken.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import numpy
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.client import Audio, Text
from omni_actors.client.prompts import speech_ability
from omni_actors.errors import ErrorCode, suggest
from omni_actors.http_server.answer import EVENTS, Answer, AnswerResponse, event, token_counts, usage_of
from omni_actors.http_server.audio_formats import MEDIA_TYPES, encoded, feed, make_encoder
from omni_actors.http_server.bodies import JsonBody
from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.fields import StagedSubmission
from omni_actors.http_server.generation import VoiceId, voice_name
from omni_actors.http_server.state import ServerState
from omni_actors.http_server.voices import recording_of
from omni_actors.protocol.client import Description
from omni_actors.protocol.payloads import AUTO, CLIP, CLIP_RATE, INSTRUCTIONS, LANGUAGE, TRANSCRIPT, SpeechAbility

MAX_SPEECH_TEXT = 4096
READ_ALOUD = (
    "Read the text between the marks aloud, word for word, in its own language. "
    "Say nothing else: no greeting, no comment, no translation.{style}\n\n<<<\n{text}\n>>>"
)
FIELDS: dict[str, str] = {
    ErrorCode.UNKNOWN_VOICE: "voice",
    ErrorCode.UNKNOWN_MODALITY: "model",
    ErrorCode.PROMPT_TOO_LONG: "input",
    # The clip and what is said in it belong to the voice that the request names.
    **dict.fromkeys((CLIP, CLIP_RATE, TRANSCRIPT), "voice"),
}


class SpeechRequest(StagedSubmission, frozen=True, kw_only=True):
    """Body of POST /v1/audio/speech."""

    input: Annotated[str, Meta(min_length=1, max_length=MAX_SPEECH_TEXT)]
    voice: str | VoiceId | None = None
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm", "aac"] = "mp3"
    stream_format: Literal["audio", "sse"] | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None  # OpenAI's range; only 1 is possible
    instructions: Annotated[str, Meta(max_length=MAX_SPEECH_TEXT)] | None = None
    language: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


BODY = JsonBody(SpeechRequest, {})


async def speech(request: Request, state: ServerState, body: SpeechRequest) -> Response:
    """Speak a text. The audio is sent while it is generated."""
    if body.speed not in (None, 1):
        message = "speed must be 1: the voice has one speed. Its manner can be asked for in instructions."
        raise bad_field("speed", message, "unsupported_value")
    description, _ = await state.model(body.model)
    ability = speech_ability(description)
    if ability is not None:
        prompt, options = await _spoken(body, state, description, ability)
    else:
        prompt, options = await _read_aloud(body, state, description)
    answer = await Answer.begin(
        request,
        state,
        body,
        prompt,
        FIELDS,
        **options,
        params=state.stage_params(body.model, body.params_by_stage(), description, {}),
    )
    timeout = state.settings.write_timeout
    if body.stream_format == "sse":
        given = body.input if ability is not None else None
        events = _events(answer, body.response_format, description, given)
        return AnswerResponse(answer, events, EVENTS, timeout)
    if body.response_format == "flac" and body.stream_format is None:
        # FLAC states its length at the beginning. A stream cannot, so readers such as libsndfile fail at its end;
        # therefore FLAC is streamed only on explicit request.
        async with answer:
            chunks = [item.samples async for item in answer if isinstance(item, Audio)]
            samples = numpy.concatenate(chunks) if chunks else numpy.zeros(0, numpy.float32)
            return Response(await encoded(samples, "flac", description.sample_rate), media_type=MEDIA_TYPES["flac"])
    pieces = _encoded(answer, body.response_format, description, [])
    return AnswerResponse(answer, pieces, MEDIA_TYPES[body.response_format], timeout)


async def _read_aloud(body: SpeechRequest, state: ServerState, description: Description) -> tuple[str, dict[str, Any]]:
    """What a model that answers is asked, and options for the pipeline."""
    if body.language is not None:
        message = "This model finds the language of a text out by itself: leave language out."
        raise bad_field("language", message, "unsupported_parameter")
    style = f" Speak like this: {body.instructions}." if body.instructions else ""
    voice = state.voice(voice_name(body.voice), description, "voice")
    return READ_ALOUD.format(style=style, text=body.input), {"modalities": ["text", "audio"], "voice": voice}


async def _spoken(
    body: SpeechRequest, state: ServerState, description: Description, ability: SpeechAbility
) -> tuple[str, dict[str, Any]]:
    """The text for a model that speaks it, and options for the pipeline.

    Raises:
        HttpError: 400 for what this model does not take, or takes and does not get.
    """
    information: dict[str, Any] = {}
    if body.language is not None:
        languages = {name.casefold(): name for name in (*ability.languages, AUTO)}
        if body.language.casefold() not in languages:
            nearest = suggest(body.language, list(languages.values()))
            raise bad_field("language", f"language must be one of {', '.join(languages.values())}.{nearest}")
        information[LANGUAGE] = languages[body.language.casefold()]
    if body.instructions and ability.instructions == "none":
        message = "This model takes no instructions: it speaks in the manner of its voice."
        raise bad_field("instructions", message, "unsupported_parameter")
    if body.instructions:
        information[INSTRUCTIONS] = body.instructions
    elif ability.instructions == "required":
        message = "instructions: this model makes up a voice: describe it, and how it speaks."
        raise bad_field("instructions", message, "missing_required_parameter")
    if ability.clip == "none":
        voice = state.voice(voice_name(body.voice), description, "voice")
        known = {name.casefold(): name for name in description.voices}
        voice = known.get(voice.casefold(), voice) if voice is not None else None
        return body.input, {"modalities": ["audio"], "voice": voice, "additional_information": information}
    recorded, samples = await recording_of(voice_name(body.voice), state)
    information |= {CLIP: samples, CLIP_RATE: recorded.rate}
    if recorded.transcript is not None:
        information[TRANSCRIPT] = recorded.transcript
    return body.input, {"modalities": ["audio"], "additional_information": information}


async def _encoded(answer: Answer, name: str, description: Description, texts: list[str]) -> AsyncIterator[bytes]:
    """Encode the sound of an answer; its text goes into `texts`."""
    encoder = make_encoder(name, description.sample_rate)
    if head := encoder.begin():
        yield head
    async for item in answer:
        if isinstance(item, Text):
            texts.append(item.text)
        elif isinstance(item, Audio) and (data := await feed(encoder, item.samples)):
            yield data
    if data := encoder.finish():
        yield data


async def _events(answer: Answer, name: str, description: Description, given: str | None) -> AsyncIterator[bytes]:
    """Stream OpenAI's speech.audio.delta and speech.audio.done events, the latter with the spoken text.

    Args:
        given: that text, if the model speaks what it is given; `None` if it answers.
    """
    texts: list[str] = []
    async for data in _encoded(answer, name, description, texts):
        yield event({"type": "speech.audio.delta", "audio": data})
    usage = token_counts(usage_of(answer.usage, description))
    transcript = "".join(texts) if given is None else given
    yield event({"type": "speech.audio.done", "usage": usage, "transcript": transcript})
