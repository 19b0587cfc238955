"""The route /v1/audio/speech: an omni model reads a text aloud.

The pipeline has no stage that speaks a given text. The model is asked to repeat the text and speaks its own answer,
which is nearly always the same. The events of `stream_format: "sse"` contain the text that was really spoken.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import numpy
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.client import Audio, Text
from omni_actors.errors import ErrorCode
from omni_actors.http_server.answer import Answer, AnswerResponse, event, token_counts, usage_of
from omni_actors.http_server.audio_formats import MEDIA_TYPES, encoded, feed, make_encoder
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.json_body import JsonBody
from omni_actors.http_server.schemas import SpeechRequest, voice_name
from omni_actors.http_server.state import State
from omni_actors.protocol.client import Description

router = APIRouter()
BODY = JsonBody(SpeechRequest)

READ_ALOUD = (
    "Read the text between the marks aloud, word for word, in its own language. "
    "Say nothing else: no greeting, no comment, no translation.{style}\n\n<<<\n{text}\n>>>"
)
FIELDS: dict[str, str] = {
    ErrorCode.UNKNOWN_VOICE: "voice",
    ErrorCode.UNKNOWN_MODALITY: "model",
    ErrorCode.PROMPT_TOO_LONG: "input",
}


@router.post("/v1/audio/speech", response_class=Response, openapi_extra=BODY.openapi())
async def speech(body: Annotated[SpeechRequest, Depends(BODY)], request: Request, state: State) -> Response:
    """Speak a text. The audio is sent while it is generated."""
    if body.speed not in (None, 1):
        message = "speed must be 1: the voice has one speed. Its manner can be asked for in instructions."
        raise bad_field("speed", message, "unsupported_value")
    description = await state.facts()
    state.model_name(body.model, description)
    style = f" Speak like this: {body.instructions}." if body.instructions else ""
    answer = await Answer.begin(
        request,
        state,
        READ_ALOUD.format(style=style, text=body.input),
        FIELDS,
        modalities=["text", "audio"],
        voice=state.voice(voice_name(body.voice), description, "voice"),
        params=state.stage_params(body.params_by_stage(), description, state.adapted(body.model, description, {})),
        seed=body.seed,
        timeout=body.timeout,
        priority=body.priority or 0,
    )
    timeout = state.settings.write_timeout
    if body.stream_format == "sse":
        return AnswerResponse(answer, _events(answer, body.response_format, description), "text/event-stream", timeout)
    if body.response_format == "flac" and body.stream_format is None:
        # FLAC states its length at the beginning. A stream cannot, so readers such as libsndfile fail at its end;
        # therefore FLAC is streamed only on explicit request.
        async with answer:
            chunks = [item.samples async for item in answer if isinstance(item, Audio)]
            samples = numpy.concatenate(chunks) if chunks else numpy.zeros(0, numpy.float32)
            return Response(await encoded(samples, "flac", description.sample_rate), media_type=MEDIA_TYPES["flac"])
    pieces = _encoded(answer, body.response_format, description)
    return AnswerResponse(answer, pieces, MEDIA_TYPES[body.response_format], timeout)


async def _encoded(answer: Answer, name: str, description: Description) -> AsyncIterator[bytes]:
    encoder = make_encoder(name, description.sample_rate)
    if head := encoder.begin():
        yield head
    async for item in answer:
        if isinstance(item, Audio) and (data := await feed(encoder, item.samples)):
            yield data
    if data := encoder.finish():
        yield data


async def _events(answer: Answer, name: str, description: Description) -> AsyncIterator[bytes]:
    """Stream OpenAI's speech.audio.delta and speech.audio.done events, the latter with the spoken text."""
    encoder = make_encoder(name, description.sample_rate)
    texts: list[str] = []

    def delta(data: bytes) -> bytes:
        return event({"type": "speech.audio.delta", "audio": data})

    try:
        if head := encoder.begin():
            yield delta(head)
        async for item in answer:
            if isinstance(item, Text):
                texts.append(item.text)
            elif isinstance(item, Audio) and (data := await feed(encoder, item.samples)):
                yield delta(data)
        if data := encoder.finish():
            yield delta(data)
    except HttpError as error:
        yield event(error.body())
        return
    done: dict[str, Any] = {
        "type": "speech.audio.done",
        "usage": token_counts(usage_of(answer.usage, description)),
        "transcript": "".join(texts),
    }
    yield event(done)
