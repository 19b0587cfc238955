"""The routes /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy
from msgspec import Meta, Raw, json
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.client import Audio, StreamItem, Text
from omni_actors.errors import ErrorCode
from omni_actors.http_server.answer import (
    DONE_EVENT,
    EVENTS,
    GOES_ON,
    LEAST_LOGPROB,
    Answer,
    AnswerResponse,
    chat_logprobs,
    encoded_base64,
    ending,
    event,
    kept_logprobs,
    pcm16,
    prompt_logprobs,
    text_or_sound,
    token_logprobs,
    usage_of_choices,
)
from omni_actors.http_server.bodies import (
    MAX_TOKEN_VALUES,
    MAX_TOKENS,
    OF_CHATS,
    OF_COMPLETIONS,
    BodyText,
    JsonBody,
    Modalities,
    Strict,
    decode,
    reserve,
)
from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.generation import (
    MAX_MESSAGES,
    AnyMessage,
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
from omni_actors.protocol.fields import PositiveInt, TokenId
from omni_actors.protocol.messages import Description
from omni_actors.protocol.payloads import (
    USE_AUDIO_IN_VIDEO,
    CollectedCalls,
    PositionLogprobs,
    PromptPosition,
    ToolCall,
    ToolCallPiece,
)

DEFAULT_MAX_TOKENS = 16  # OpenAI's
COMPLETION_FIELDS: dict[str, str] = {ErrorCode.PROMPT_TOO_LONG: "prompt", ErrorCode.INVALID_PAYLOAD: "prompt"}

ONE = Meta(min_length=1, max_length=1)
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)]
PROMPT_FORMS = (BodyText, TokenIds, Annotated[list[BodyText], ONE], Annotated[list[TokenIds], ONE])
Prompt = Annotated[Raw, Meta(extra_json_schema={"anyOf": [json.schema(form) for form in PROMPT_FORMS]})]
AnyPrompt = BodyText | Annotated[list[BodyText | TokenId | TokenIds], Meta(max_length=MAX_TOKENS)]


class CompletionRequest(Sampling, frozen=True, kw_only=True):
    """Body of POST /v1/completions: one prompt, as text or token ids, or a list of that one prompt."""

    prompt: Prompt
    logprobs: Likeliest | None = None

    def likeliest(self) -> int | None:
        """OpenAI's `logprobs` is a number here."""
        return self.logprobs

    def text_or_tokens(self) -> str | list[int]:
        """Decode `prompt`. Raises `HttpError` unless it has one of the forms."""
        prompt: Any = decode(self.prompt, AnyPrompt, "prompt")  # type: ignore[arg-type]  # a union is no class
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if not prompt:
            raise bad_field("prompt", "The prompt is empty.")
        if isinstance(prompt, str):
            return prompt
        tokens = [token for token in prompt if isinstance(token, int)]
        if len(tokens) < len(prompt):
            raise bad_field("prompt", "Each request takes one prompt: a string, or a list of token ids.")
        return tokens


COMPLETION_BODY = JsonBody(CompletionRequest, OF_COMPLETIONS, MAX_TOKEN_VALUES)


async def completions(request: Request, state: ServerState, body: CompletionRequest) -> Response:
    """Answer one prompt in text.

    A prompt of token ids goes to the model unchanged. A prompt of text becomes one user message in the chat template,
    the only form the model was trained on.
    """
    body.check()
    prompt = body.text_or_tokens()
    description, model = await state.model(body.model)
    answer = await Answer.begin(
        request,
        state,
        body,
        prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt},
        {**COMPLETION_FIELDS, **body.error_fields()},
        modalities=["text"],
        params=state.stage_params(
            body.model, body.params_by_stage(), description, {"max_tokens": DEFAULT_MAX_TOKENS, **body.stage_fields()}
        ),
        n=body.answers(description.max_in_flight),
    )
    head: dict[str, Any] = {"id": f"cmpl-{request.state.request_id}", "object": "text_completion", "model": model}
    head["created"] = int(time.time())

    logprobs = [CompletionLogprobs() for _ in answer.usages]

    def choice(
        index: int, text: str, end: Mapping[str, Any], likely: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, **end, "logprobs": likely}

    def finished(index: int) -> dict[str, Any]:
        return ending(answer.usages[index], description)

    async def events() -> AsyncIterator[bytes]:
        async for index, item in answer.choices():
            if isinstance(item, Text):
                likely = logprobs[index].piece(item.logprobs)
                yield event({**head, "choices": [choice(index, item.text, GOES_ON, likely)]})
            elif item is None:
                yield event({**head, "choices": [choice(index, "", finished(index))]})
        if body.stream_options and body.stream_options.include_usage:
            yield event({**head, "choices": [], "usage": usage_of_choices(answer.usages, description)})
        yield DONE_EVENT

    if body.stream:
        return AnswerResponse(answer, events(), EVENTS, state.settings.write_timeout)
    async with answer:
        texts: list[list[str]] = [[] for _ in answer.usages]
        positions: list[PromptPosition] = []
        async for index, item in answer.choices():
            if isinstance(item, Text):
                texts[index].append(item.text)
                logprobs[index].keep(item.logprobs)
                positions.extend(item.prompt_logprobs)
        choices: list[dict[str, Any]] = [
            choice(index, "".join(pieces), finished(index), logprobs[index].kept or None)
            for index, pieces in enumerate(texts)
        ]
        if body.prompt_logprobs is not None:  # each choice has the prompt's, as with vLLM
            of_prompt = Raw(json.encode(prompt_logprobs(positions)))
            choices = [{**made, "prompt_logprobs": of_prompt} for made in choices]
        whole = {**head, "choices": choices, "usage": usage_of_choices(answer.usages, description)}
        return json_response(whole)


class CompletionLogprobs:
    """The `logprobs` of a text completion's choice, piece by piece. Offsets count characters of the tokens' texts."""

    def __init__(self) -> None:
        self._offset = 0
        self.kept: dict[str, list[Any]] = {}

    def keep(self, positions: Sequence[PositionLogprobs]) -> None:
        """Add the next positions to `kept`. They count as bytes of the request until its answer is sent."""
        if piece := self.piece(positions):
            reserve(sum(memoryview(likeliest).nbytes for likeliest in piece["top_logprobs"]))
            for name, values in piece.items():
                self.kept.setdefault(name, []).extend(values)

    def piece(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
        """The next positions; `None` for none."""
        if not positions:
            return None
        offsets = []
        for position in positions:
            offsets.append(self._offset)
            self._offset += len(position.token.text)
        return {
            "text_offset": offsets,
            "token_logprobs": [max(position.token.logprob, LEAST_LOGPROB) for position in positions],
            "tokens": [position.token.text for position in positions],
            "top_logprobs": [Raw(json.encode(_likeliest(position))) for position in positions],
        }


def _likeliest(position: PositionLogprobs) -> dict[str, float]:
    return {token.text: max(token.logprob, LEAST_LOGPROB) for token in (*position.top, position.token)}


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
        self._logprobs: list[Raw] = []
        self.prompt_logprobs: list[PromptPosition] = []

    def keep(self, item: StreamItem) -> None:
        """Keep an item of an answer that is sent whole."""
        if isinstance(item, Text):
            self._texts.append(item.text)
            self._calls.add(item.tool_calls)
            self._logprobs.extend(kept_logprobs(item.logprobs))
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
        return {"index": self._index, "delta": delta, **end, "logprobs": chat_logprobs(token_logprobs(logprobs))}

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
