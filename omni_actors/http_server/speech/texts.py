"""The route /v1/audio/speech.

A pipeline of a speech model speaks the text that it is given (`Description.speech`). One that answers has no stage for
that: its model is asked to repeat the text and speaks its own answer, which is nearly always the same. The events of
`stream_format: "sse"` contain the text that was really spoken.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.http_server.answer import EVENTS, Answer, AnswerResponse, WholeAnswer, event
from omni_actors.http_server.bodies import OF_SPEECH, JsonBody
from omni_actors.http_server.encoders import MEDIA_TYPES, Tempo, encoded, made_encoder
from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.speech.recital import (
    FIELDS,
    LONGEST,
    Manner,
    Recital,
    TextPiece,
    TextSpeaker,
    Utterance,
    pieces_of,
    request_ids,
    speakable,
    times_of,
)
from omni_actors.http_server.state import ServerState

MAX_TEXT = 100_000
IN_ONE_GO = 4096  # characters that a model speaks as they are: OpenAI's limit


class SpeechRequest(Manner, frozen=True, kw_only=True):
    """Body of POST /v1/audio/speech."""

    input: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
    stream_format: Literal["audio", "sse"] | None = None
    timestamp_granularities: Annotated[list[Literal["word"]], Meta(max_length=1)] | None = None


BODY = JsonBody(SpeechRequest, OF_SPEECH)


async def speech(request: Request, state: ServerState, body: SpeechRequest) -> Response:
    """Speak a text. The audio is sent while it is generated."""
    if not body.input.strip():
        raise bad_field("input", "input: there is nothing to say.")
    whole = body.response_format == "flac" and body.stream_format is None
    if whole and len(body.input) > IN_ONE_GO:
        message = f'A text of more than {IN_ONE_GO} characters is streamed, as FLAC with stream_format: "audio".'
        raise bad_field("response_format", message, "unsupported_value")
    expires = math.inf if body.timeout is None else time.monotonic() + body.timeout
    speaker = await TextSpeaker.of(request, state, body, request_ids(request.state.request_id), expires)
    description, timeout = speaker.description, state.settings.write_timeout
    encoder = await made_encoder(body.response_format, description.sample_rate, body.speed)
    timed = bool(body.timestamp_granularities)
    utterance = Utterance(speaker, encoder, timed=timed)
    if timed and body.stream_format != "sse":
        message = 'Times of words come as events: ask for stream_format: "sse".'
        raise bad_field("timestamp_granularities", message, "unsupported_value")
    if timed and speaker.aligner is None:
        message = "This server does not know when words are said: http.transcriber can name a pipeline that does."
        raise bad_field("timestamp_granularities", message, "unsupported_value")
    in_one_go = len(body.input) <= (LONGEST if timed else IN_ONE_GO)  # an aligner hears minutes, and not more
    texts = [body.input] if in_one_go else [*map(speakable, pieces_of(body.input))]
    recital = Recital(TextPiece(utterance, text) for text in texts)
    # What is not encoded piece by piece gets its speed before.
    tempos = [await asyncio.to_thread(Tempo, body.speed)] if whole and body.speed not in (None, 1) else []
    answer = await Answer.of(recital, request, state, FIELDS, tempos)
    if body.stream_format == "sse":
        return AnswerResponse(answer, _events(answer, recital, utterance, body), EVENTS, timeout)
    if whole:
        # FLAC states its length at the beginning. A stream cannot, so readers such as libsndfile fail at its end;
        # therefore FLAC is streamed only on explicit request.
        async with answer:
            found = WholeAnswer()
            async for item in answer:
                found.add(item)
            file = await encoded(found.samples, "flac", description.sample_rate)
            return Response(file, media_type=MEDIA_TYPES["flac"])
    return AnswerResponse(answer, _file(answer, recital, utterance), MEDIA_TYPES[body.response_format], timeout)


async def _file(answer: Answer, recital: Recital, utterance: Utterance) -> AsyncIterator[bytes]:
    async for _, item in answer.choices():
        if item is not None and (data := await recital.piece.take(item)):
            yield data
    yield utterance.encoder.finish()


async def _events(answer: Answer, recital: Recital, utterance: Utterance, body: SpeechRequest) -> AsyncIterator[bytes]:
    """Stream OpenAI's speech.audio.delta and speech.audio.done events, the latter with the spoken text.

    With times of words, speech.audio.words comes behind the sound of each piece.
    """
    begin = 0.0
    async for _, item in answer.choices():
        piece = recital.piece
        if item is not None:
            if data := await piece.take(item):
                yield event({"type": "speech.audio.delta", "audio": data})
            continue
        if words := await piece.complete():
            times = times_of(words, begin, body.speed or 1)
            yield event({"type": "speech.audio.words", "text": utterance.texts[-1], "words": times})
        begin += piece.seconds
    if data := utterance.encoder.finish():
        yield event({"type": "speech.audio.delta", "audio": data})
    transcript = " ".join(filter(None, utterance.texts)) if utterance.speaker.answers else body.input
    yield event({"type": "speech.audio.done", "usage": utterance.usage(), "transcript": transcript})
