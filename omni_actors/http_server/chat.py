"""The route /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.client import Text
from omni_actors.errors import ErrorCode
from omni_actors.http_server.answer import DONE_EVENT, Answer, AnswerResponse, event, finish_reason, usage_of
from omni_actors.http_server.audio_formats import encoded, pcm16
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.json_body import JsonBody
from omni_actors.http_server.logprobs import chat_logprobs
from omni_actors.http_server.schemas import ChatRequest, voice_name
from omni_actors.http_server.state import ServerState, State
from omni_actors.protocol.client import Description
from omni_actors.protocol.logprobs import PositionLogprobs
from omni_actors.protocol.tools import CollectedCalls, ToolCall, ToolCallPiece

router = APIRouter()
BODY = JsonBody(ChatRequest)

STREAM_FORMAT = "pcm16"
FIELDS: dict[str, str] = {
    ErrorCode.UNKNOWN_VOICE: "audio.voice",
    ErrorCode.UNKNOWN_MODALITY: "modalities",
    ErrorCode.PROMPT_TOO_LONG: "messages",
    ErrorCode.MALFORMED_MEDIA: "messages",
}


@router.post("/v1/chat/completions", response_class=Response, openapi_extra=BODY.openapi())
async def chat_completions(body: Annotated[ChatRequest, Depends(BODY)], request: Request, state: State) -> Response:
    """Answer a chat in text, or in text and speech; complete or as server-sent events."""
    body.refuse_unsupported()
    description = await state.facts()
    model = state.model_name(body.model, description)
    spoken = "audio" in (body.modalities or ())
    audio_format = _audio_format(body)
    params = state.stage_params(body.params_by_stage(), description, body.stage_fields())
    answer = await Answer.begin(
        request,
        state,
        {"messages": await state.media.messages(body.messages, description.max_media), **body.tool_options()},
        {**FIELDS, **body.error_fields()},
        modalities=body.modalities or ["text"],
        voice=state.voice(voice_name(body.audio.voice), description, "audio.voice") if spoken and body.audio else None,
        params=params,
        seed=body.seed,
        priority=body.priority or 0,
        timeout=body.timeout,
    )
    reply = ChatReply(request.state.request_id, model, spoken, description, state)
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return AnswerResponse(
            answer, reply.events(answer, include_usage), "text/event-stream", state.settings.write_timeout
        )
    async with answer:
        return Response(await reply.whole(answer, audio_format), media_type="application/json")


def _audio_format(body: ChatRequest) -> str:
    given = body.audio.format if body.audio is not None else None
    if not body.stream:
        return given or "wav"
    if given not in (None, STREAM_FORMAT) and "audio" in (body.modalities or ()):
        raise bad_field("audio.format", f"With stream: true the format must be {STREAM_FORMAT!r}.", "unsupported_value")
    return STREAM_FORMAT


class ChatReply:
    """Converts an answer to OpenAI's objects. As with OpenAI, the text of a spoken answer is its transcript."""

    def __init__(self, request_id: str, model: str, spoken: bool, description: Description, state: ServerState) -> None:
        self._head = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}
        self._audio_id = f"audio_{request_id}"
        self._spoken = spoken
        self._description = description
        self._state = state

    async def whole(self, answer: Answer, audio_format: str) -> bytes:
        """The whole answer as a chat.completion object."""
        texts: list[str] = []
        pieces: list[Any] = []
        calls = CollectedCalls()
        logprobs: list[PositionLogprobs] = []
        rate = self._description.sample_rate or 24_000
        async for item in answer:
            if isinstance(item, Text):
                texts.append(item.text)
                calls.add(item.tool_calls)
                logprobs.extend(item.logprobs)
            else:
                pieces.append(item.samples)
                rate = item.sample_rate
        text = "".join(texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [_call(call) for call in calls.whole()]
        if self._spoken and (text or pieces or not calls):
            samples = numpy.concatenate(pieces) if pieces else numpy.zeros(0, numpy.float32)
            message["content"] = None
            message["audio"] = {
                "id": self._audio_id,
                "data": await encoded(samples, audio_format, rate),
                "expires_at": self._state.transcripts.add(self._audio_id, text),
                "transcript": text,
            }
        finish = self._finish_reason(answer, bool(calls))
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": chat_logprobs(logprobs)}
        usage = usage_of(answer.usage, self._description)
        return msgspec.json.encode({**self._head, "object": "chat.completion", "choices": [choice], "usage": usage})

    async def events(self, answer: Answer, include_usage: bool) -> AsyncIterator[bytes]:
        """Stream chat.completion.chunk objects as server-sent events. A later failure becomes an error event."""
        usage = {"usage": None} if include_usage else {}
        head = {**self._head, "object": "chat.completion.chunk", **usage}

        def chunk(delta: dict[str, Any], finish: str | None = None, logprobs: Sequence[PositionLogprobs] = ()) -> bytes:
            about = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": chat_logprobs(logprobs)}
            return event({**head, "choices": [about]})

        texts: list[str] = []
        called = False
        first: dict[str, Any] = {"role": "assistant", "refusal": None}
        if self._spoken:
            yield chunk({**first, "audio": {"id": self._audio_id, "transcript": ""}})
        else:
            yield chunk({**first, "content": ""})
        try:
            async for item in answer:
                if not isinstance(item, Text):
                    yield chunk({"audio": {"id": self._audio_id, "data": pcm16(item.samples)}})
                    continue
                texts.append(item.text)
                if item.text or item.logprobs:  # there is no text where the tokens so far end inside a character
                    transcript = {"audio": {"id": self._audio_id, "transcript": item.text}}
                    yield chunk(transcript if self._spoken else {"content": item.text}, logprobs=item.logprobs)
                if item.tool_calls:
                    called = True
                    yield chunk({"tool_calls": [_call_delta(piece) for piece in item.tool_calls]})
        except HttpError as error:
            yield event(error.body())
            return
        if self._spoken:
            expires = self._state.transcripts.add(self._audio_id, "".join(texts))
            yield chunk({"audio": {"id": self._audio_id, "expires_at": expires}})
        yield chunk({}, self._finish_reason(answer, called))
        if include_usage:
            yield event({**head, "choices": [], "usage": usage_of(answer.usage, self._description)})
        yield DONE_EVENT

    def _finish_reason(self, answer: Answer, called: bool) -> str:
        reason = finish_reason(answer.usage, self._description)
        return "tool_calls" if called and reason == "stop" else reason


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(piece: ToolCallPiece) -> dict[str, Any]:
    """The next piece of a call; id and type come with the name."""
    function = {"name": piece.name} if piece.name else {}
    begin = {"id": piece.id, "type": "function"} if piece.id else {}
    return {"index": piece.index, **begin, "function": {**function, "arguments": piece.arguments}}
