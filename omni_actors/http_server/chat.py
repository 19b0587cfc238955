"""The routes /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Raw, json
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
    WholeAnswer,
    chat_logprobs,
    ending,
    event,
    prompt_logprobs,
    text_or_sound,
    token_logprobs,
    usage_of,
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
from omni_actors.http_server.encoders import encoded_base64, pcm16
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
)
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.protocol.fields import PositiveInt, TokenId
from omni_actors.protocol.messages import Description
from omni_actors.protocol.payloads import USE_AUDIO_IN_VIDEO, PositionLogprobs, PromptPosition, ToolCall, ToolCallPiece

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
        prompt: Any = decode(self.prompt, AnyPrompt, "prompt")  # type: ignore[arg-type]  # a union is not a class
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
    reply = TextReply(head, [CompletionChoice(index) for index in range(len(answer.usages))], answer, description)
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return AnswerResponse(answer, reply.events(head, include_usage), EVENTS, state.settings.write_timeout)
    async with answer:
        whole = await reply.whole()
        if body.prompt_logprobs is not None:  # each choice has the prompt's, as with vLLM
            whole["choices"] = [{**choice, "prompt_logprobs": reply.of_prompt()} for choice in whole["choices"]]
        return json_response(whole)


class CompletionChoice:
    """One of the answers to a text completion. The offsets of its `logprobs` count characters of the tokens' texts."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._offset = 0
        self._texts: list[str] = []
        self._logprobs: dict[str, list[Any]] = {}
        self.prompt_logprobs: list[PromptPosition] = []

    def keep(self, item: StreamItem) -> None:
        """Keep an item of an answer that is sent whole. Log probabilities count as bytes of the request until then."""
        if isinstance(item, Text):
            self._texts.append(item.text)
            self.prompt_logprobs.extend(item.prompt_logprobs)
            if likely := self._likely(item.logprobs):
                reserve(sum(memoryview(likeliest).nbytes for likeliest in likely["top_logprobs"]))
                for name, values in likely.items():
                    self._logprobs.setdefault(name, []).extend(values)

    async def whole(self, end: Mapping[str, Any]) -> dict[str, Any]:
        """The choice of a whole text_completion object."""
        return {"index": self._index, "text": "".join(self._texts), **end, "logprobs": self._logprobs or None}

    def begin(self) -> Iterator[dict[str, Any]]:
        """The first choices of a stream: none."""
        return iter(())

    def chunks(self, item: StreamItem) -> Iterator[dict[str, Any]]:
        """The choices of the objects that an item becomes in a stream."""
        if isinstance(item, Text):
            yield {"index": self._index, "text": item.text, **GOES_ON, "logprobs": self._likely(item.logprobs)}

    def end(self, end: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The last choices of a stream."""
        yield {"index": self._index, "text": "", **end, "logprobs": None}

    def _likely(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
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
        voice=state.voice(body.audio.voice, description, "audio.voice") if spoken and body.audio else None,
        params=params,
        n=body.answers(description.max_in_flight),
        speed=(body.audio and body.audio.speed) or 1,
    )
    rate = description.sample_rate or 24_000
    ids = [f"audio_{request.state.request_id}{f'-{index}' if index else ''}" for index in range(len(answer.usages))]
    choices = [ChatChoice(index, audio_id, form if spoken else None, rate, state) for index, audio_id in enumerate(ids)]
    head = {"id": f"chatcmpl-{request.state.request_id}", "created": int(time.time()), "model": model}
    reply = TextReply({**head, "object": "chat.completion"}, choices, answer, description)
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        chunk = {**head, "object": "chat.completion.chunk", **({"usage": None} if include_usage else {})}
        return AnswerResponse(answer, reply.events(chunk, include_usage), EVENTS, state.settings.write_timeout)
    async with answer:
        whole = await reply.whole()
        if body.prompt_logprobs is not None:
            whole["prompt_logprobs"] = reply.of_prompt()
        return json_response(whole)


class ChatChoice:
    """One of the answers to a chat: what has come of it, and its objects in OpenAI's form.

    As with OpenAI, the text of a spoken answer is its transcript.

    Args:
        audio_format: of the sound; `None` for an answer that is not spoken.
        rate: of the sound, in Hz.
    """

    def __init__(self, index: int, audio_id: str, audio_format: str | None, rate: int, state: ServerState) -> None:
        self._index = index
        self._audio_id = audio_id
        self._format, self._rate = audio_format, rate
        self._transcripts = state.transcripts
        self._came = WholeAnswer()  # of a stream, texts and calls
        self.keep = self._came.add
        self.prompt_logprobs = self._came.prompt_logprobs

    async def whole(self, end: Mapping[str, Any]) -> dict[str, Any]:
        """The choice of a chat.completion object."""
        came, text = self._came, self._came.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if came.calls:
            message["content"] = text or None
            message["tool_calls"] = [_call(call) for call in came.calls.whole()]
        if self._format and (text or came.pieces or not came.calls):
            message["content"] = None
            message["audio"] = {
                "id": self._audio_id,
                "data": await encoded_base64(came.samples, self._format, self._rate),
                "expires_at": self._transcripts.add(self._audio_id, text, len(text)),
                "transcript": text,
            }
        return {"index": self._index, "message": message, **self._end(end), "logprobs": chat_logprobs(came.logprobs)}

    def begin(self) -> Iterator[dict[str, Any]]:
        """The first choice of a stream."""
        first = {"audio": {"id": self._audio_id, "transcript": ""}} if self._format else {"content": ""}
        yield self._chunk({"role": "assistant", "refusal": None, **first})

    def chunks(self, item: StreamItem) -> Iterator[dict[str, Any]]:
        """The choices of the chunks that an item becomes."""
        if isinstance(item, Audio):
            yield self._chunk({"audio": {"id": self._audio_id, "data": pcm16(item.samples)}})
        if not isinstance(item, Text):
            return
        self._came.texts.append(item.text)
        if item.text or item.logprobs:  # there is no text where the tokens so far end inside a character
            transcript = {"audio": {"id": self._audio_id, "transcript": item.text}}
            yield self._chunk(transcript if self._format else {"content": item.text}, logprobs=item.logprobs)
        if item.tool_calls:
            self._came.calls.add(item.tool_calls)
            yield self._chunk({"tool_calls": [_call_delta(piece) for piece in item.tool_calls]})

    def end(self, end: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The last choices of a stream."""
        if self._format:
            text = self._came.text
            expires = self._transcripts.add(self._audio_id, text, len(text))
            yield self._chunk({"audio": {"id": self._audio_id, "expires_at": expires}})
        yield self._chunk({}, self._end(end))

    def _chunk(
        self, delta: dict[str, Any], end: Mapping[str, Any] = GOES_ON, logprobs: Sequence[PositionLogprobs] = ()
    ) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, **end, "logprobs": chat_logprobs(token_logprobs(logprobs))}

    def _end(self, end: Mapping[str, Any]) -> Mapping[str, Any]:
        called = bool(self._came.calls) and end["finish_reason"] == "stop"
        return {**end, "finish_reason": "tool_calls"} if called else end


class TextReply:
    """Converts the answers to a chat or a text completion to OpenAI's objects."""

    def __init__(
        self,
        head: Mapping[str, Any],
        choices: Sequence[ChatChoice | CompletionChoice],
        answer: Answer,
        description: Description,
    ) -> None:
        self._head = head
        self._choices = choices
        self._answer = answer
        self._description = description

    async def whole(self) -> dict[str, Any]:
        """The whole answers as one object."""
        async for index, item in self._answer.choices():
            if item is not None:
                self._choices[index].keep(item)
        choices = [await choice.whole(self._ending(index)) for index, choice in enumerate(self._choices)]
        return {**self._head, "choices": choices, "usage": usage_of(self._answer.usages, self._description)}

    def of_prompt(self) -> Raw:
        """The log probabilities of the prompt, which come with the first answer."""
        return Raw(json.encode(prompt_logprobs(self._choices[0].prompt_logprobs)))

    async def events(self, head: Mapping[str, Any], include_usage: bool) -> AsyncIterator[bytes]:
        """Stream objects with this head as server-sent events."""
        for choice in self._choices:
            for piece in choice.begin():
                yield event({**head, "choices": [piece]})
        async for index, item in self._answer.choices():
            choice = self._choices[index]
            for piece in choice.end(self._ending(index)) if item is None else choice.chunks(item):
                yield event({**head, "choices": [piece]})
        if include_usage:
            yield event({**head, "choices": [], "usage": usage_of(self._answer.usages, self._description)})
        yield DONE_EVENT

    def _ending(self, index: int) -> dict[str, Any]:
        return ending(self._answer.usages[index], self._description)


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(piece: ToolCallPiece) -> dict[str, Any]:
    """The next piece of a call; id and type come with the name."""
    function = {"name": piece.name} if piece.name else {}
    begin = {"id": piece.id, "type": "function"} if piece.id else {}
    return {"index": piece.index, **begin, "function": {**function, "arguments": piece.arguments}}
