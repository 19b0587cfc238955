"""The routes /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    speech_of,
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
)
from omni_actors.http_server.encoders import encoded_base64, pcm16
from omni_actors.http_server.errors import bad_field, fields_at_fault
from omni_actors.http_server.generation import (
    MAX_MESSAGES,
    PARAMETERS,
    AnyMessage,
    AssistantMessage,
    AudioParameters,
    Likeliest,
    NamedTool,
    Sampling,
    ToolMessage,
    ToolMode,
    Tools,
    Turn,
    answers_of,
    called_tool,
    tool_options,
)
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.http_server.store import Store
from omni_actors.protocol.fields import PositiveInt, TokenId
from omni_actors.protocol.messages import Description
from omni_actors.protocol.payloads import USE_AUDIO_IN_VIDEO, PositionLogprobs, ToolCall, ToolCallPiece

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


COMPLETION_BODY = JsonBody(CompletionRequest, OF_COMPLETIONS, MAX_TOKEN_VALUES, PARAMETERS)


async def completions(request: Request, state: ServerState, body: CompletionRequest) -> Response:
    """Answer one prompt in text.

    A prompt of token ids goes to the model unchanged. A prompt of text becomes one user message in the chat template,
    the only form the model was trained on.
    """
    body.check()
    prompt = body.text_or_tokens()
    description, model = await state.model(body.model)
    fields = {"max_tokens": DEFAULT_MAX_TOKENS, **body.stage_fields()}
    answer = await Answer.begin(
        request,
        state,
        body,
        prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt},
        {**COMPLETION_FIELDS, **body.error_fields()},
        modalities=["text"],
        params=state.stage_params(body.model, body.params_by_stage(), description, fields),
        n=answers_of(body.n, description.max_in_flight),
    )
    head = _head("cmpl", "text_completion", request, model)
    choices = [CompletionChoice(index) for index in range(len(answer.usages))]
    return await TextReply(body, head, choices, answer, description).response(state)


def _head(prefix: str, kind: str, request: Request, model: str) -> dict[str, Any]:
    """What all objects of an answer begin with."""
    return {"id": f"{prefix}-{request.state.request_id}", "object": kind, "created": int(time.time()), "model": model}


@dataclass
class CompletionChoice:
    """One of the answers to a text completion. The offsets of its `logprobs` count characters of the tokens' texts."""

    index: int
    came: WholeAnswer = field(default_factory=lambda: WholeAnswer(_likely_tokens))
    offset: int = 0

    async def whole(self, end: Mapping[str, Any]) -> dict[str, Any]:
        """The choice of a whole text_completion object."""
        return {"index": self.index, "text": self.came.text, **end, "logprobs": self._likely(self.came.logprobs)}

    def begin(self) -> Iterator[dict[str, Any]]:
        """The first choices of a stream: none."""
        return iter(())

    def chunks(self, item: StreamItem) -> Iterator[dict[str, Any]]:
        """The choices of the objects that an item becomes in a stream."""
        if isinstance(item, Text):
            likely = self._likely(_likely_tokens(item.logprobs))
            yield {"index": self.index, "text": item.text, **GOES_ON, "logprobs": likely}

    def end(self, end: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The last choices of a stream."""
        yield {"index": self.index, "text": "", **end, "logprobs": None}

    def _likely(self, tokens: Sequence[Raw]) -> dict[str, Any] | None:
        """The `logprobs` of the next tokens; `None` for none."""
        if not tokens:
            return None
        texts, logprobs, top = zip(*(json.decode(token, type=LikelyToken) for token in tokens), strict=True)
        *offsets, self.offset = itertools.accumulate(map(len, texts), initial=self.offset)
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": texts, "top_logprobs": top}


LikelyToken = tuple[str, float, Raw]  # its text, and the likeliest at its place by their texts


def _likely_tokens(positions: Sequence[PositionLogprobs]) -> list[Raw]:
    """The JSON of a `LikelyToken` for each token."""
    found = []
    for token, top in ((position.token, position.top) for position in positions):
        likeliest = {one.text: max(one.logprob, LEAST_LOGPROB) for one in (*top, token)}
        found.append(Raw(json.encode((token.text, max(token.logprob, LEAST_LOGPROB), likeliest))))
    return found


OTHER_FIELDS = {"prompt": "messages", USE_AUDIO_IN_VIDEO: f"mm_processor_kwargs.{USE_AUDIO_IN_VIDEO}"}
FIELDS = fields_at_fault("messages", "messages", "modalities", unknown_voice="audio.voice", **OTHER_FIELDS)


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


BODY = JsonBody(ChatRequest, OF_CHATS, parameters=PARAMETERS)


def turns_of(messages: Sequence[AnyMessage], transcripts: Store[str]) -> dict[str, Turn]:
    """The messages as those of any route. Raises `HttpError` for sound of an answer that is not kept any more."""
    found: dict[str, Turn] = {}
    for index, message in enumerate(messages):
        where, role = f"messages[{index}]", str(message.__struct_config__.tag)
        turn = found[where] = Turn("system" if role == "developer" else role, message.content or "")
        if isinstance(message, ToolMessage):
            turn.answers = (message.tool_call_id, f"{where}.tool_call_id")
        elif isinstance(message, AssistantMessage):
            turn.content = turn.content or _said(message, where, transcripts)
            made = [(call.id, call.function) for call in message.tool_calls or ()]
            turn.calls = [called_tool(call_id, function.name, function.arguments) for call_id, function in made]
    return found


def _said(message: AssistantMessage, where: str, transcripts: Store[str]) -> str:
    if message.audio is None:
        return message.refusal or ""
    text = transcripts.find(message.audio.id)
    text = message.audio.transcript if text is None else text
    if text is None:
        unknown = "This audio is not known, or no longer: send its text as content, or its transcript with its id."
        raise bad_field(f"{where}.audio.id", unknown)
    return text


async def chat_completions(request: Request, state: ServerState, body: ChatRequest) -> Response:
    """Answer a chat in text, or in text and speech; complete or as server-sent events."""
    body.check()
    description, model = await state.model(body.model)
    form, options = speech_of(body.modalities, body.audio, body.stream, description, state)
    params = state.stage_params(body.model, body.params_by_stage(), description, body.stage_fields())
    sound_in_video = bool(body.mm_processor_kwargs and body.mm_processor_kwargs.use_audio_in_video)
    turns = turns_of(body.messages, state.transcripts)
    messages = await state.media.messages(turns, description.max_media, sound_in_video=sound_in_video)
    answer = await Answer.begin(
        request,
        state,
        body,
        {"messages": messages, **body.tool_options()},
        {**FIELDS, **body.error_fields()},
        params=params,
        n=answers_of(body.n, description.max_in_flight),
        **options,
    )
    rate = description.sample_rate or 24_000
    ids = [f"audio_{request.state.request_id}{f'-{index}' if index else ''}" for index in range(len(answer.usages))]
    choices = [ChatChoice(index, audio_id, form, rate, state.transcripts) for index, audio_id in enumerate(ids)]
    head = _head("chatcmpl", "chat.completion", request, model)
    return await TextReply(body, head, choices, answer, description).response(state)


@dataclass
class ChatChoice:
    """One of the answers to a chat: what has come of it, and its objects in OpenAI's form.

    As with OpenAI, the text of a spoken answer is its transcript.

    Args:
        form: format of the sound; `None` for an answer that is not spoken.
        rate: of the sound, in Hz.
        came: of a stream, texts and calls.
    """

    index: int
    audio_id: str
    form: str | None
    rate: int
    transcripts: Store[str]
    came: WholeAnswer = field(default_factory=WholeAnswer)

    async def whole(self, end: Mapping[str, Any]) -> dict[str, Any]:
        """The choice of a chat.completion object."""
        came, text = self.came, self.came.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if came.calls:
            message["content"] = text or None
            message["tool_calls"] = [_call(call) for call in came.calls.whole()]
        if self.form and (text or came.pieces or not came.calls):
            message["content"] = None
            message["audio"] = {
                "id": self.audio_id,
                "data": await encoded_base64(came.samples, self.form, self.rate),
                "expires_at": self.transcripts.add(self.audio_id, text, len(text)),
                "transcript": text,
            }
        return {"index": self.index, "message": message, **self._end(end), "logprobs": chat_logprobs(came.logprobs)}

    def begin(self) -> Iterator[dict[str, Any]]:
        """The first choice of a stream."""
        first = {"audio": {"id": self.audio_id, "transcript": ""}} if self.form else {"content": ""}
        yield self._chunk({"role": "assistant", "refusal": None, **first})

    def chunks(self, item: StreamItem) -> Iterator[dict[str, Any]]:
        """The choices of the chunks that an item becomes."""
        if isinstance(item, Audio):
            yield self._chunk({"audio": {"id": self.audio_id, "data": pcm16(item.samples)}})
        if not isinstance(item, Text):
            return
        self.came.texts.append(item.text)
        if item.text or item.logprobs:  # there is no text where the tokens so far end inside a character
            transcript = {"audio": {"id": self.audio_id, "transcript": item.text}}
            yield self._chunk(transcript if self.form else {"content": item.text}, logprobs=item.logprobs)
        if item.tool_calls:
            self.came.calls.add(item.tool_calls)
            yield self._chunk({"tool_calls": [_call_delta(piece) for piece in item.tool_calls]})

    def end(self, end: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The last choices of a stream."""
        if self.form:
            text = self.came.text
            expires = self.transcripts.add(self.audio_id, text, len(text))
            yield self._chunk({"audio": {"id": self.audio_id, "expires_at": expires}})
        yield self._chunk({}, self._end(end))

    def _chunk(
        self, delta: dict[str, Any], end: Mapping[str, Any] = GOES_ON, logprobs: Sequence[PositionLogprobs] = ()
    ) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, **end, "logprobs": chat_logprobs(token_logprobs(logprobs))}

    def _end(self, end: Mapping[str, Any]) -> Mapping[str, Any]:
        called = bool(self.came.calls) and end["finish_reason"] == "stop"
        return {**end, "finish_reason": "tool_calls"} if called else end


@dataclass(frozen=True)
class TextReply:
    """Converts the answers to a chat or a text completion to OpenAI's objects."""

    body: ChatRequest | CompletionRequest
    head: Mapping[str, Any]
    choices: Sequence[ChatChoice | CompletionChoice]
    answer: Answer
    description: Description

    async def response(self, state: ServerState) -> Response:
        """The answers as one object, or as events. Raises `HttpError`."""
        if self.body.stream:
            return AnswerResponse(self.answer, self._events(), EVENTS, state.settings.write_timeout)
        async with self.answer:
            return json_response(await self._whole())

    async def _whole(self) -> dict[str, Any]:
        async for index, item in self.answer.choices():
            if item is not None:
                self.choices[index].came.add(item)
        choices = [await choice.whole(self._ending(index)) for index, choice in enumerate(self.choices)]
        whole = {**self.head, "choices": choices, "usage": usage_of(self.answer.usages, self.description)}
        if self.body.prompt_logprobs is not None:  # where vLLM has them
            likely = Raw(json.encode(prompt_logprobs(self.choices[0].came.prompt_logprobs)))
            for part in [whole] if isinstance(self.body, ChatRequest) else choices:
                part["prompt_logprobs"] = likely
        return whole

    async def _events(self) -> AsyncIterator[bytes]:
        include_usage = bool(self.body.stream_options and self.body.stream_options.include_usage)
        head = {**self.head, **({"usage": None} if include_usage else {})}
        if isinstance(self.body, ChatRequest):
            head["object"] = "chat.completion.chunk"
        for choice in self.choices:
            for piece in choice.begin():
                yield event({**head, "choices": [piece]})
        async for index, item in self.answer.choices():
            choice = self.choices[index]
            for piece in choice.end(self._ending(index)) if item is None else choice.chunks(item):
                yield event({**head, "choices": [piece]})
        if include_usage:
            yield event({**head, "choices": [], "usage": usage_of(self.answer.usages, self.description)})
        yield DONE_EVENT

    def _ending(self, index: int) -> dict[str, Any]:
        return ending(self.answer.usages[index], self.description)


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(piece: ToolCallPiece) -> dict[str, Any]:
    """The next piece of a call; id and type come with the name."""
    function = {"name": piece.name} if piece.name else {}
    begin = {"id": piece.id, "type": "function"} if piece.id else {}
    return {"index": piece.index, **begin, "function": {**function, "arguments": piece.arguments}}
