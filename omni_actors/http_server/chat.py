"""The route /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy
from msgspec import Meta
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.client import Audio, StreamItem, Text
from omni_actors.errors import ErrorCode
from omni_actors.http_server.answer import (
    DONE_EVENT,
    EVENTS,
    GOES_ON,
    Answer,
    AnswerResponse,
    chat_logprobs,
    ending,
    event,
    prompt_logprobs,
    text_or_sound,
    usage_of_choices,
)
from omni_actors.http_server.audio_formats import encoded_base64, pcm16
from omni_actors.http_server.bodies import JsonBody
from omni_actors.http_server.chat_messages import MAX_MESSAGES, AnyMessage
from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.fields import OF_CHATS, Modalities, Strict
from omni_actors.http_server.generation import (
    AudioParameters,
    Likeliest,
    NamedTool,
    Sampling,
    ToolMode,
    Tools,
    audio_format,
    tool_options,
    voice_name,
)
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.protocol.client import Description
from omni_actors.protocol.fields import PositiveInt
from omni_actors.protocol.payloads import USE_AUDIO_IN_VIDEO, PositionLogprobs, PromptPosition
from omni_actors.protocol.tools import CollectedCalls, ToolCall, ToolCallPiece

FIELDS: dict[str, str] = {
    ErrorCode.UNKNOWN_VOICE: "audio.voice",
    ErrorCode.UNKNOWN_MODALITY: "modalities",
    ErrorCode.PROMPT_TOO_LONG: "messages",
    ErrorCode.MALFORMED_MEDIA: "messages",
    "prompt": "messages",
    USE_AUDIO_IN_VIDEO: f"mm_processor_kwargs.{USE_AUDIO_IN_VIDEO}",
}


class ProcessorArguments(Strict, frozen=True):
    """Arguments for the model's processor, in vLLM's form."""

    use_audio_in_video: bool | None = None


class ChatRequest(Sampling, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    modalities: Modalities | None = None
    audio: AudioParameters | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: Tools | None = None
    tool_choice: ToolMode | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    mm_processor_kwargs: ProcessorArguments | None = None  # vLLM's

    def tool_options(self) -> dict[str, Any]:
        """The tools of the request and how they may be called, as the client library takes them."""
        choice = self.tool_choice.function if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        functions = [tool.function for tool in self.tools or ()]
        return tool_options(functions, choice, self.parallel_tool_calls, "tool_choice.function")

    def likeliest(self) -> int | None:
        """OpenAI's `logprobs` switches them on, and `top_logprobs` is the number."""
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "top_logprobs needs logprobs: true.")
        return (self.top_logprobs or 0) if self.logprobs else None

    def stage_fields(self) -> dict[str, Any]:
        """Parameters for the stages; `max_completion_tokens` wins over the older `max_tokens`."""
        newer = {} if self.max_completion_tokens is None else {"max_tokens": self.max_completion_tokens}
        return {**super().stage_fields(), **newer}


BODY = JsonBody(ChatRequest, OF_CHATS)


async def chat_completions(request: Request, state: ServerState, body: ChatRequest) -> Response:
    """Answer a chat in text, or in text and speech; complete or as server-sent events."""
    body.check()
    description, model = await state.model(body.model)
    spoken = "audio" in (body.modalities or ())
    form = audio_format(body.audio, spoken, body.stream)
    params = state.stage_params(body.model, body.params_by_stage(), description, body.stage_fields())
    sound_in_video = bool(body.mm_processor_kwargs and body.mm_processor_kwargs.use_audio_in_video)
    messages = await state.media.messages(body.messages, description.max_media, sound_in_video=sound_in_video)
    answer = await Answer.begin(
        request,
        state,
        body,
        {"messages": messages, **body.tool_options()},
        {**FIELDS, **body.error_fields()},
        modalities=text_or_sound(body.modalities, body.audio),
        voice=state.voice(voice_name(body.audio.voice), description, "audio.voice") if spoken and body.audio else None,
        params=params,
        n=body.answers(description.max_in_flight),
    )
    choices = [ChatChoice(index, request.state.request_id, spoken, state) for index in range(len(answer.usages))]
    reply = ChatReply(request.state.request_id, model, choices, answer, description)
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return AnswerResponse(answer, reply.events(include_usage), EVENTS, state.settings.write_timeout)
    async with answer:
        return json_response(await reply.whole(form, body.prompt_logprobs))


class ChatChoice:
    """One of the answers to a chat: what has come of it, and its objects in OpenAI's form.

    As with OpenAI, the text of a spoken answer is its transcript.
    """

    def __init__(self, index: int, request_id: str, spoken: bool, state: ServerState) -> None:
        self._index = index
        self._audio_id = f"audio_{request_id}-{index}" if index else f"audio_{request_id}"
        self._spoken = spoken
        self._state = state
        self._texts: list[str] = []
        self._pieces: list[NDArray[numpy.float32]] = []
        self._calls = CollectedCalls()
        self._called = False
        self._logprobs: list[PositionLogprobs] = []
        self.prompt_logprobs: list[PromptPosition] = []

    def keep(self, item: StreamItem) -> None:
        """Keep an item of an answer that is sent whole."""
        if isinstance(item, Text):
            self._texts.append(item.text)
            self._calls.add(item.tool_calls)
            self._logprobs.extend(item.logprobs)
            self.prompt_logprobs.extend(item.prompt_logprobs)
        elif isinstance(item, Audio):
            self._pieces.append(item.samples)

    async def whole(self, end: Mapping[str, Any], audio_format: str, rate: int) -> dict[str, Any]:
        """The choice of a chat.completion object."""
        text = "".join(self._texts)
        self._called = bool(self._calls)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._called:
            message["content"] = text or None
            message["tool_calls"] = [_call(call) for call in self._calls.whole()]
        if self._spoken and (text or self._pieces or not self._called):
            samples = numpy.concatenate(self._pieces) if self._pieces else numpy.zeros(0, numpy.float32)
            message["content"] = None
            message["audio"] = {
                "id": self._audio_id,
                "data": await encoded_base64(samples, audio_format, rate),
                "expires_at": self._state.transcripts.add(self._audio_id, text, len(text)),
                "transcript": text,
            }
        return {"index": self._index, "message": message, **self._end(end), "logprobs": chat_logprobs(self._logprobs)}

    def begin(self) -> dict[str, Any]:
        """The first choice of the stream's chunks."""
        first: dict[str, Any] = {"role": "assistant", "refusal": None}
        if self._spoken:
            return self._chunk({**first, "audio": {"id": self._audio_id, "transcript": ""}})
        return self._chunk({**first, "content": ""})

    def chunks(self, item: StreamItem) -> Iterator[dict[str, Any]]:
        """The choices of the chunks that an item becomes."""
        if isinstance(item, Audio):
            yield self._chunk({"audio": {"id": self._audio_id, "data": pcm16(item.samples)}})
        if not isinstance(item, Text):
            return
        self._texts.append(item.text)
        if item.text or item.logprobs:  # there is no text where the tokens so far end inside a character
            transcript = {"audio": {"id": self._audio_id, "transcript": item.text}}
            yield self._chunk(transcript if self._spoken else {"content": item.text}, logprobs=item.logprobs)
        if item.tool_calls:
            self._called = True
            yield self._chunk({"tool_calls": [_call_delta(piece) for piece in item.tool_calls]})

    def end(self, end: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The last choices of the stream's chunks."""
        if self._spoken:
            text = "".join(self._texts)
            expires = self._state.transcripts.add(self._audio_id, text, len(text))
            yield self._chunk({"audio": {"id": self._audio_id, "expires_at": expires}})
        yield self._chunk({}, self._end(end))

    def _chunk(
        self, delta: dict[str, Any], end: Mapping[str, Any] = GOES_ON, logprobs: Sequence[PositionLogprobs] = ()
    ) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, **end, "logprobs": chat_logprobs(logprobs)}

    def _end(self, end: Mapping[str, Any]) -> Mapping[str, Any]:
        called = self._called and end["finish_reason"] == "stop"
        return {**end, "finish_reason": "tool_calls"} if called else end


class ChatReply:
    """Converts the answers to a chat to OpenAI's objects."""

    def __init__(
        self, request_id: str, model: str, choices: Sequence[ChatChoice], answer: Answer, description: Description
    ) -> None:
        self._head = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}
        self._choices = choices
        self._answer = answer
        self._description = description

    async def whole(self, audio_format: str, likeliest: int | None) -> dict[str, Any]:
        """The whole answers as a chat.completion object.

        Args:
            likeliest: how many of the likeliest tokens it has for each of the prompt's; `None` for nothing about them.
        """
        async for index, item in self._answer.choices():
            if item is not None:
                self._choices[index].keep(item)
        rate = self._description.sample_rate or 24_000
        choices = [
            await choice.whole(self._ending(index), audio_format, rate) for index, choice in enumerate(self._choices)
        ]
        content = {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}
        if likeliest is not None:
            content["prompt_logprobs"] = prompt_logprobs(self._choices[0].prompt_logprobs)
        return content

    async def events(self, include_usage: bool) -> AsyncIterator[bytes]:
        """Stream chat.completion.chunk objects as server-sent events."""
        usage = {"usage": None} if include_usage else {}
        head = {**self._head, "object": "chat.completion.chunk", **usage}
        for choice in self._choices:
            yield event({**head, "choices": [choice.begin()]})
        async for index, item in self._answer.choices():
            choice = self._choices[index]
            for piece in choice.end(self._ending(index)) if item is None else choice.chunks(item):
                yield event({**head, "choices": [piece]})
        if include_usage:
            yield event({**head, "choices": [], "usage": self._usage()})
        yield DONE_EVENT

    def _ending(self, index: int) -> dict[str, Any]:
        return ending(self._answer.usages[index], self._description)

    def _usage(self) -> dict[str, Any]:
        return usage_of_choices(self._answer.usages, self._description)


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(piece: ToolCallPiece) -> dict[str, Any]:
    """The next piece of a call; id and type come with the name."""
    function = {"name": piece.name} if piece.name else {}
    begin = {"id": piece.id, "type": "function"} if piece.id else {}
    return {"index": piece.index, **begin, "function": {**function, "arguments": piece.arguments}}
