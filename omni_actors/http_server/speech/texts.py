"""The route /v1/audio/speech.

A pipeline of a speech model speaks the text that it is given (`Description.speech`). One that answers has no stage for
that: its model is asked to repeat the text and speaks its own answer, which is nearly always the same. The events of
`stream_format: "sse"` contain the text that was really spoken.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.client import Audio, Text
from omni_actors.http_server.answer import (
    EVENTS,
    MEDIA_TYPES,
    Answer,
    AnswerResponse,
    Samples,
    WholeAnswer,
    encoded,
    encoded_pieces,
    event,
    token_counts,
    usage_of,
)
from omni_actors.http_server.bodies import JsonBody
from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.speech.recital import FIELDS, Manner, Piece, Recital, Speaker, Utterance, request_ids
from omni_actors.http_server.speech.sentences import pieces_of
from omni_actors.http_server.state import ServerState
from omni_actors.protocol.messages import Description

MAX_TEXT = 100_000
IN_ONE_GO = 4096  # characters that a model speaks as they are: OpenAI's limit


class SpeechRequest(Manner, frozen=True, kw_only=True):
    """Body of POST /v1/audio/speech."""

    input: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
    stream_format: Literal["audio", "sse"] | None = None


BODY = JsonBody(SpeechRequest, {})


async def speech(request: Request, state: ServerState, body: SpeechRequest) -> Response:
    """Speak a text. The audio is sent while it is generated."""
    whole = body.response_format == "flac" and body.stream_format is None
    if whole and len(body.input) > IN_ONE_GO:
        message = f'A text of more than {IN_ONE_GO} characters is streamed, as FLAC with stream_format: "audio".'
        raise bad_field("response_format", message, "unsupported_value")
    expires = math.inf if body.timeout is None else time.monotonic() + body.timeout
    speaker = await Speaker.of(request, state, body, request_ids(request.state.request_id), expires)
    utterance = Utterance(speaker)
    texts = [body.input] if len(body.input) <= IN_ONE_GO else map(spoken_part, pieces_of(body.input))
    answer = await Answer.of(Recital(Piece(utterance, text) for text in texts), request, state, FIELDS)
    description, timeout = speaker.description, state.settings.write_timeout
    if body.stream_format == "sse":
        given = None if speaker.answers else body.input
        events = _events(answer, body.response_format, description, given)
        return AnswerResponse(answer, events, EVENTS, timeout)
    if whole:
        # FLAC states its length at the beginning. A stream cannot, so readers such as libsndfile fail at its end;
        # therefore FLAC is streamed only on explicit request.
        async with answer:
            found = WholeAnswer()
            async for item in answer:
                found.add(item)
            file = await encoded(found.samples, "flac", description.sample_rate)
            return Response(file, media_type=MEDIA_TYPES["flac"])
    pieces = _encoded(answer, body.response_format, description, [])
    return AnswerResponse(answer, pieces, MEDIA_TYPES[body.response_format], timeout)


def spoken_part(text: str) -> str:
    """What a model is given of a piece of a text: nothing, if there is nothing in it to say."""
    return text.strip() if any(map(str.isalnum, text)) else ""


async def _encoded(answer: Answer, name: str, description: Description, texts: list[str]) -> AsyncIterator[bytes]:
    """Encode the sound of an answer; the text of each piece of it goes into `texts`."""

    async def sound() -> AsyncIterator[Samples]:
        said = ""
        async for _, item in answer.choices():
            if isinstance(item, Audio):
                yield item.samples
            elif isinstance(item, Text):
                said += item.text
            elif item is None:
                texts.append(said)
                said = ""

    async for data in encoded_pieces(sound(), name, description.sample_rate):
        yield data


async def _events(answer: Answer, name: str, description: Description, given: str | None) -> AsyncIterator[bytes]:
    """Stream OpenAI's speech.audio.delta and speech.audio.done events, the latter with the spoken text.

    Args:
        given: that text, if the model speaks what it is given; `None` if it answers.
    """
    texts: list[str] = []
    async for data in _encoded(answer, name, description, texts):
        yield event({"type": "speech.audio.delta", "audio": data})
    usage = token_counts(usage_of(answer.usages, description, len(answer.usages)))
    transcript = " ".join(filter(None, texts)) if given is None else given
    yield event({"type": "speech.audio.done", "usage": usage, "transcript": transcript})
