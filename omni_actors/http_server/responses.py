"""The routes /v1/responses: OpenAI's newer form of a chat, in text, speech and calls of functions."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Raw
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from omni_actors.client import Audio, Text
from omni_actors.errors import ErrorCode
from omni_actors.http_server import generation as chat
from omni_actors.http_server.answer import (
    EVENTS,
    Answer,
    AnswerResponse,
    WholeAnswer,
    encoded_base64,
    finish_reason,
    pcm16,
    text_or_sound,
    token_counts,
    usage_of,
)
from omni_actors.http_server.bodies import (
    ABSENT,
    NULLABLE_OBJECT,
    OF_RESPONSES,
    BodyText,
    JsonBody,
    Modalities,
    OptionalLongString,
    StagedSubmission,
    Strict,
    Temperature,
    TopP,
    free_form,
    is_null,
    reserve,
)
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.generation import (
    MAX_MESSAGES,
    MAX_PARTS,
    AudioParameters,
    FlatChoice,
    FlatFormat,
    FlatTools,
    InputText,
    Likeliest,
    OutputText,
    Part,
    TextFormat,
    ToolMode,
    audio_format,
    output_form,
    tool_options,
)
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.http_server.store import KeptResponse
from omni_actors.protocol.fields import PositiveInt
from omni_actors.protocol.messages import Description
from omni_actors.protocol.payloads import CallId, Json, ToolCallPiece, ToolName

Metadata = Annotated[Raw, Meta(extra_json_schema={"type": NULLABLE_OBJECT, "additionalProperties": {"type": "string"}})]
LOGPROBS = "message.output_text.logprobs"
Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]  # the second one without effect


# ---------------------------------------------------------------------------------------------------------------------
# Input


class Refusal(Part, frozen=True, tag="refusal"):
    """A refusal of the model."""

    refusal: BodyText


class InputImage(Part, frozen=True, tag="input_image"):
    """A picture, by URL or as an uploaded file."""

    image_url: OptionalLongString = ABSENT
    file_id: str | None = None
    detail: str | None = None  # ignored, as in chats


class InputFile(Part, frozen=True, tag="input_file"):
    """A file, uploaded before or in the body."""

    file_id: str | None = None
    file_data: OptionalLongString = ABSENT
    filename: str | None = None


AnyInput = InputText | OutputText | Refusal | InputImage | chat.AudioPart | InputFile
Content = BodyText | Annotated[list[AnyInput], Meta(max_length=MAX_PARTS)]


class SpokenAnswer(Strict, frozen=True):
    """The sound of an answer, as it came; the model is given the text."""

    data: OptionalLongString = ABSENT
    transcript: BodyText | None = None


class InputItem(Strict, frozen=True):
    """A message, a call of a function or what it gave; also an item of an earlier response, as it came."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["user", "system", "developer", "assistant"] | None = None
    content: Content | None = None
    call_id: CallId | None = None
    name: ToolName | None = None
    arguments: Json | None = None
    output: Content | None = None
    audio: SpokenAnswer | None = None  # ignored, as are the next three
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class TextOptions(Strict, frozen=True):
    """The form of the text; `verbosity` is ignored."""

    format: FlatFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(Strict, frozen=True):
    """Accepted, without effect: nothing is obfuscated."""

    include_obfuscation: bool | None = None


class ResponsesRequest(StagedSubmission, frozen=True, kw_only=True):
    """Body of POST /v1/responses. `modalities` and `audio` are those of chats."""

    input: BodyText | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: BodyText | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: FlatTools | None = None
    tool_choice: ToolMode | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: Modalities | None = None
    audio: AudioParameters | None = None
    text: TextOptions | None = None
    include: Annotated[list[Include], Meta(max_length=8)] | None = None
    top_logprobs: Likeliest | None = None
    metadata: Metadata = ABSENT
    user: str | None = None  # shown, without effect

    def stage_fields(self) -> dict[str, Any]:
        """The sampling fields that are set, under the names of `StageParams`."""
        fields: dict[str, Any] = {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": self._likeliest(),
            "structured_outputs": output_form(self.text.format) if self.text is not None else None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _likeliest(self) -> int | None:
        if LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise bad_field("top_logprobs", f"top_logprobs needs include: [{LOGPROBS!r}].")
        return None

    def tool_options(self) -> dict[str, Any]:
        """The tools of the request and how they may be called, as the client library takes them."""
        return tool_options(self.tools or (), self.tool_choice, self.parallel_tool_calls, "tool_choice")


# ---------------------------------------------------------------------------------------------------------------------
# As messages of a chat


class Located(NamedTuple):
    """A message, and the field of the request that it comes from."""

    message: chat.AnyMessage
    where: str


def messages_of(items: str | Sequence[InputItem]) -> list[Located]:
    """The input as messages. Raises `HttpError` for items that lack something."""
    if isinstance(items, str):
        return [Located(chat.UserMessage(content=items), "input")]
    found: list[Located] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type == "function_call":
            _add_call(found, item, where)
        elif item.type == "function_call_output":
            content = _needed(item.output, f"{where}.output")
            call_id = _needed(item.call_id, f"{where}.call_id")
            texts = _texts(content, f"{where}.output")
            found.append(Located(chat.ToolMessage(content=texts, tool_call_id=call_id), where))
        else:
            found.append(Located(_message(item, where), where))
    return found


def _add_call(found: list[Located], item: InputItem, where: str) -> None:
    """Append a call to the answer that it is a part of: the message before it, if that is one."""
    call = chat.CalledTool(
        _needed(item.call_id, f"{where}.call_id"),
        chat.CalledFunction(_needed(item.name, f"{where}.name"), item.arguments or ""),
    )
    last = found[-1].message if found else None
    if isinstance(last, chat.AssistantMessage):
        calls = [*(last.tool_calls or ()), call]
        found[-1] = Located(chat.AssistantMessage(content=last.content, tool_calls=calls), found[-1].where)
    else:
        found.append(Located(chat.AssistantMessage(tool_calls=[call]), where))


def _message(item: InputItem, where: str) -> chat.AnyMessage:
    content = _needed(item.content, f"{where}.content")
    role = _needed(item.role, f"{where}.role")
    if role == "user":
        parts = content if isinstance(content, str) else [_part(part, where) for part in content]
        return chat.UserMessage(content=parts)
    texts = _texts(content, f"{where}.content")
    return chat.AssistantMessage(content=texts) if role == "assistant" else chat.SystemMessage(content=texts)


def _part(part: AnyInput, where: str) -> chat.AnyPart:
    if isinstance(part, chat.AudioPart):
        return part
    if isinstance(part, InputFile):
        return chat.FilePart(chat.FileReference(part.file_id, part.file_data, part.filename))
    if isinstance(part, InputImage):
        if part.file_id is not None:
            return chat.FilePart(chat.FileReference(part.file_id, part.image_url))
        if is_null(part.image_url):
            raise bad_field(f"{where}.content", "An input_image needs an image_url or a file_id.")
        return chat.ImageUrlPart(chat.Url(part.image_url))
    return chat.TextPart(_text_of(part))


def _texts(content: str | Sequence[AnyInput], where: str) -> str | list[chat.TextPart]:
    if isinstance(content, str):
        return content
    for part in content:
        if isinstance(part, chat.AudioPart | InputFile | InputImage):
            raise bad_field(where, f"{where} may hold text only.")
    return [chat.TextPart(_text_of(part)) for part in content]


def _text_of(part: AnyInput) -> str:
    if isinstance(part, InputText | OutputText):
        return part.text
    return part.refusal if isinstance(part, Refusal) else ""


def _needed(value: Any, where: str) -> Any:
    if value is None:
        raise bad_field(where, f"{where}: the field is missing.", "missing_required_parameter")
    return value


BODY = JsonBody(ResponsesRequest, OF_RESPONSES)
FIELDS: dict[str, str] = {
    ErrorCode.UNKNOWN_VOICE: "audio.voice",
    ErrorCode.UNKNOWN_MODALITY: "modalities",
    ErrorCode.PROMPT_TOO_LONG: "input",
    ErrorCode.MALFORMED_MEDIA: "input",
    "messages": "input",
    "prompt": "input",
    "structured_outputs.json": "text.format.schema",
    "structured_outputs": "text.format",
}
REPEATED = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user")
MESSAGE = re.compile(r"messages\[(\d+)\](.*)")
Conversation = list[dict[str, Any]]


async def create(request: Request, state: ServerState, body: ResponsesRequest) -> Response:
    """Answer in text, speech or calls of functions; complete or as server-sent events."""
    description, model = await state.model(body.model)
    spoken = "audio" in (body.modalities or ())
    form = audio_format(body.audio, spoken, body.stream)
    before = await _before(body, state)
    asked = await _converted(messages_of(body.input), before, description, state)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    answer = await Answer.begin(
        request,
        state,
        body,
        {"messages": [*instructions, *before, *asked], **body.tool_options()},
        FIELDS,
        modalities=text_or_sound(body.modalities, body.audio),
        voice=state.voice(body.audio.voice, description, "audio.voice") if spoken and body.audio else None,
        params=state.stage_params(body.model, body.params_by_stage(), description, body.stage_fields()),
    )
    reply = ResponseReply(f"resp_{request.state.request_id}", model, spoken, body, description)

    async def keep(content: bytes) -> None:
        if body.store is not False:
            conversation = [*before, *asked, reply.message()]
            size = _size(conversation)
            kept = KeptResponse(len(content), conversation, size)
            await asyncio.to_thread(state.responses.add, reply.id, kept, len(content) + size, content)

    if body.stream:
        pieces = reply.events(answer, keep)
        return AnswerResponse(answer, pieces, EVENTS, state.settings.write_timeout)
    async with answer:
        await reply.read(answer, form)
    content = msgspec.json.encode(reply.object("completed"))
    await keep(content)
    return Response(content, media_type="application/json")


async def retrieve(request: Request, state: ServerState) -> Response:
    """A response that is still kept."""
    response_id = request.path_params["response_id"]
    found = await _kept(response_id, state)
    headers = {"content-length": str(found.size)}
    return StreamingResponse(state.responses.pieces(response_id, found.size), 200, headers, "application/json")


async def delete(request: Request, state: ServerState) -> Response:
    """Forget a response."""
    response_id = request.path_params["response_id"]
    if not await asyncio.to_thread(state.responses.remove, response_id):
        raise _no_response(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def _kept(response_id: str, state: ServerState) -> KeptResponse:
    """The response with this id. Raises `HttpError` 404 if it is not kept, or no longer."""
    found = await asyncio.to_thread(state.responses.find, response_id)
    if found is None:
        raise _no_response(response_id)
    return found


def _no_response(response_id: str) -> HttpError:
    message = f"There is no response {response_id[:100]!r}, or no longer: send its items again."
    return HttpError(404, message, param="response_id", code="response_not_found")


def _size(value: Any) -> int:
    """Bytes of the texts and media in nested lists and mappings, with something for each container."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return 64 + sum(_size(item) for item in value.values())
    if isinstance(value, list | tuple):
        return 64 + sum(_size(item) for item in value)
    return int(getattr(value, "nbytes", 8))


async def _before(body: ResponsesRequest, state: ServerState) -> Conversation:
    """The turns that the request continues. They are sent to the pipeline again, so they count as if in the body."""
    if body.previous_response_id is None:
        return []
    try:
        found = await _kept(body.previous_response_id, state)
    except HttpError as error:
        raise bad_field("previous_response_id", error.message, "previous_response_not_found") from None
    reserve(found.conversation_bytes)
    return found.conversation


async def _converted(
    located: Sequence[Located], before: Conversation, description: Description, state: ServerState
) -> Conversation:
    """Messages with their media, as the client library takes them. Errors name the field of the input."""
    known = {call["id"] for message in before for call in message.get("tool_calls", ())}
    try:
        return await state.media.messages([item.message for item in located], description.max_media, known)
    except HttpError as error:
        if found := MESSAGE.fullmatch(error.param or ""):
            rest = found[2].replace(".image_url.url", ".image_url").replace(".file.", ".")
            where = f"{located[int(found[1])].where}{rest.replace('.tool_call_id', '.call_id')}"
            error.message = error.message.replace(error.param or "", where)
            error.param = where
        elif error.param == "messages":
            error.param = "input"
        raise


class ResponseReply:
    """Converts an answer to OpenAI's response and its events."""

    def __init__(
        self, response_id: str, model: str, spoken: bool, body: ResponsesRequest, description: Description
    ) -> None:
        self.id = response_id
        self._spoken = spoken
        self._body = body
        self._description = description
        self._model = model
        self._created = int(time.time())
        self._came = WholeAnswer()  # of a stream, all but the sound
        self._audio: msgspec.Raw | None = None
        self._usage: dict[str, Any] | None = None
        self._length = False  # whether the limit of tokens ended it
        self._number = 0  # of events

    async def read(self, answer: Answer, audio_format: str) -> None:
        """Read the whole answer."""
        came = self._came
        async for item in answer:
            came.add(item)
        if self._spoken and (came.pieces or not came.calls):
            self._audio = await encoded_base64(came.samples, audio_format, self._description.sample_rate or 24_000)
        self._end(answer)

    def _end(self, answer: Answer) -> None:
        usage = usage_of(answer.usages, self._description)
        self._length = finish_reason(answer.usages[0], self._description) == "length"
        self._usage = {
            **token_counts(usage),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
            "stages": usage["stages"],
        }

    # -- objects ------------------------------------------------------------------------------------------------------

    def object(self, status: str, error: HttpError | None = None) -> dict[str, Any]:
        """The response as it stands; `status` as it is unless the limit of tokens ended it."""
        body = self._body
        status = "incomplete" if status == "completed" and self._length else status
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **{name: getattr(body, name) for name in REPEATED},
            "metadata": free_form(body.metadata, dict[str, str], "metadata") or {},
            "model": self._model,
            "output": self._output(status) if status in ("completed", "incomplete") else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store is not False,
            "text": {"format": _plain((body.text and body.text.format) or TextFormat())},
            "tool_choice": body.tool_choice or "auto",
            "tools": _plain(body.tools or []),
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "usage": self._usage,
        }

    def message(self) -> dict[str, Any]:
        """The answer as a message of the next turn."""
        calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in self._came.calls.whole()]
        said = {"role": "assistant", "content": self._came.text}
        return {**said, "tool_calls": calls} if calls else said

    def _output(self, status: str) -> list[dict[str, Any]]:
        items = [self._message_item(status)] if self._has_message else []
        whole = self._came.calls.whole()
        return items + [self._call_item(index, call.id, call.name, call.arguments) for index, call in enumerate(whole)]

    @property
    def _has_message(self) -> bool:
        return not self._came.calls or any(self._came.texts)

    def _message_item(self, status: str) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if status != "in_progress":
            content.append(_text_part(self._came.text, self._came.logprobs))
        item: dict[str, Any] = {"id": f"msg_{self.id[5:]}", "type": "message", "role": "assistant", "status": status}
        item["content"] = content
        if self._audio is not None:  # OpenAI has no such field
            item["audio"] = {"data": self._audio, "transcript": self._came.text}
        return item

    def _call_item(
        self, index: int, call_id: str, name: str, arguments: str, status: str = "completed"
    ) -> dict[str, Any]:
        named = {"call_id": call_id, "name": name, "arguments": arguments, "status": status}
        return {"id": f"fc_{self.id[5:]}_{index}", "type": "function_call", **named}

    # -- events -------------------------------------------------------------------------------------------------------

    async def events(self, answer: Answer, keep: Callable[[bytes], Awaitable[None]]) -> AsyncIterator[bytes]:
        """Stream the events of an answer. A later failure becomes `response.failed` and `error`.

        Args:
            keep: awaited with the response as JSON when it is complete.
        """
        yield self._event("response.created", response=self.object("in_progress"))
        yield self._event("response.in_progress", response=self.object("in_progress"))
        opened = False  # the message
        sent = 0  # log probabilities
        came = self._came
        try:
            async for item in answer:
                if isinstance(item, Audio):
                    yield self._event("response.audio.delta", delta=pcm16(item.samples))
                if not isinstance(item, Text):
                    continue
                came.add(item)
                if item.text:
                    if not opened:
                        opened = True
                        for piece in self._open_message():
                            yield piece
                    likely = came.logprobs[sent:]  # a token may end inside a character
                    sent = len(came.logprobs)
                    yield self._event("response.output_text.delta", **self._part, delta=item.text, logprobs=likely)
                    if self._spoken:
                        yield self._event("response.audio.transcript.delta", delta=item.text)
                for call in item.tool_calls:
                    for piece in self._call_events(call):
                        yield piece
            self._end(answer)
        except HttpError as error:
            yield self._event("response.failed", response=self.object("failed", error))
            about = {"code": error.code, "message": error.message, "param": error.param}
            yield self._event("error", **about, **error.body())
            return
        if not opened and self._has_message:
            for piece in self._open_message():
                yield piece
        for piece in self._close():
            yield piece
        done = self.object("completed")
        await keep(msgspec.json.encode(done))
        yield self._event(f"response.{done['status']}", response=done)

    @property
    def _part(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self.id[5:]}", "output_index": 0, "content_index": 0}

    def _open_message(self) -> list[bytes]:
        item = self._message_item("in_progress")
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._part, part=_text_part("")),
        ]

    def _call_events(self, piece: ToolCallPiece) -> list[bytes]:
        """A call's begin, and its arguments. Calls end with the answer."""
        output_index = piece.index + (1 if any(self._came.texts) else 0)
        found = []
        if piece.name:
            item = self._call_item(piece.index, piece.id, piece.name, "", "in_progress")
            found.append(self._event("response.output_item.added", output_index=output_index, item=item))
        if piece.arguments:
            where = {"item_id": f"fc_{self.id[5:]}_{piece.index}", "output_index": output_index}
            found.append(self._event("response.function_call_arguments.delta", **where, delta=piece.arguments))
        return found

    def _close(self) -> list[bytes]:
        """The ends of the message and of the calls."""
        found: list[bytes] = []
        status = "incomplete" if self._length else "completed"
        text, likely = self._came.text, self._came.logprobs
        if self._spoken:
            found.append(self._event("response.audio.transcript.done"))
            found.append(self._event("response.audio.done"))
        for index, item in enumerate(self._output(status)):
            where = {"item_id": item["id"], "output_index": index}
            if item["type"] == "message":
                found.append(self._event("response.output_text.done", **self._part, text=text, logprobs=likely))
                found.append(self._event("response.content_part.done", **self._part, part=_text_part(text, likely)))
            else:
                named = {"arguments": item["arguments"], "name": item["name"]}
                found.append(self._event("response.function_call_arguments.done", **where, **named))
            found.append(self._event("response.output_item.done", output_index=index, item=item))
        return found

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _plain(value: Any) -> Any:
    """A copy in plain lists and mappings: the structs of a request hold parts of its body, and so all of it."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _text_part(text: str, logprobs: Sequence[Raw] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
