"""The routes /v1/responses: OpenAI's newer form of a chat, in text, speech and calls of functions."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from omni_actors.http_server.answer import EVENTS, Answer, AnswerResponse, speech_of
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
    is_null,
    reserve,
)
from omni_actors.http_server.errors import bad_field, fields_at_fault
from omni_actors.http_server.generation import (
    MAX_MESSAGES,
    MAX_PARTS,
    AudioParameters,
    AudioPart,
    FileReference,
    FlatChoice,
    FlatFormat,
    FlatTools,
    InputText,
    Likeliest,
    OutputText,
    Part,
    Source,
    ToolMode,
    Turn,
    called_tool,
    output_form,
    tool_options,
)
from omni_actors.http_server.response_events import END, Keep, ResponseReply, SentEvents
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.http_server.store import Journal, KeptResponse
from omni_actors.protocol.fields import PositiveInt
from omni_actors.protocol.payloads import CallId, Json, ToolName

Metadata = Annotated[Raw, Meta(extra_json_schema={"type": NULLABLE_OBJECT, "additionalProperties": {"type": "string"}})]
LOGPROBS = "message.output_text.logprobs"
Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]  # the second one without effect


class Refusal(Part, frozen=True, tag="refusal"):
    """A refusal of the model."""

    refusal: BodyText

    def source(self, where: str) -> str:
        """See `Content.source`."""
        return self.refusal


class InputImage(Part, frozen=True, tag="input_image"):
    """A picture, by URL or as an uploaded file."""

    image_url: OptionalLongString = ABSENT
    file_id: str | None = None
    detail: str | None = None  # ignored, as in chats

    def source(self, where: str) -> Source:
        """See `Content.source`."""
        if self.file_id is not None:
            return FileReference(self.file_id, self.image_url).source(where)
        if is_null(self.image_url):
            raise bad_field(where, "An input_image needs an image_url or a file_id.")
        return Source(f"{where}.image_url", "image", self.image_url)


class InputFile(FileReference, frozen=True, tag_field="type", tag="input_file"):
    """A file, uploaded before or in the body."""


AnyInput = InputText | OutputText | Refusal | InputImage | AudioPart | InputFile
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


def turns_of(items: str | Sequence[InputItem]) -> dict[str, Turn]:
    """The input as messages. Raises `HttpError` for items that lack something."""
    if isinstance(items, str):
        return {"input": Turn("user", items)}
    found: dict[str, Turn] = {}
    last: Turn | None = None
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type == "function_call":
            call_id, name = _needed(item.call_id, f"{where}.call_id"), _needed(item.name, f"{where}.name")
            if last is None or last.role != "assistant":  # a call belongs to the answer before it, if that is one
                last = found[where] = Turn("assistant", "")
            last.calls.append(called_tool(call_id, name, item.arguments or ""))
        elif item.type == "function_call_output":
            content = _needed(item.output, f"{where}.output")
            call_id = _needed(item.call_id, f"{where}.call_id")
            _check_text(content, f"{where}.output")
            last = found[where] = Turn("tool", content, answers=(call_id, f"{where}.call_id"))
        else:
            content = _needed(item.content, f"{where}.content")
            role = _needed(item.role, f"{where}.role")
            if role != "user":
                _check_text(content, f"{where}.content")
            last = found[where] = Turn("system" if role == "developer" else role, content)
    return found


def _check_text(content: str | Sequence[AnyInput], where: str) -> None:
    if any(isinstance(part, AudioPart | InputFile | InputImage) for part in content):
        raise bad_field(where, f"{where} may hold text only.")


def _needed(value: Any, where: str) -> Any:
    if value is None:
        raise bad_field(where, f"{where}: the field is missing.", "missing_required_parameter")
    return value


BODY = JsonBody(ResponsesRequest, OF_RESPONSES)


# ---------------------------------------------------------------------------------------------------------------------
# The routes

OTHER_FIELDS = {"messages": "input", "prompt": "input", "structured_outputs": "text.format"}
OTHER_FIELDS["structured_outputs.json"] = "text.format.schema"
FIELDS = fields_at_fault("input", "input", "modalities", unknown_voice="audio.voice", **OTHER_FIELDS)
Conversation = list[dict[str, Any]]
SEED_BITS = 63
LAST_EVENT = "Last-Event-ID"
EVENT_ID = re.compile(r"[0-9]{1,15}")


class StreamHead(msgspec.Struct):
    """What the journal of a streamed response begins with: what it is made from again."""

    body: bytes
    created: int


class RetrieveQuery(Strict, frozen=True):
    """The query of GET /v1/responses/ID."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0)] | None = None
    include_obfuscation: bool | None = None  # without effect


async def create(request: Request, state: ServerState, body: ResponsesRequest) -> Response:
    """Answer in text, speech or calls of functions; complete or as server-sent events."""
    if body.stream and body.seed is None:
        body = msgspec.structs.replace(body, seed=secrets.randbits(SEED_BITS))
    sent = SentEvents(f"resp_{request.state.request_id}", int(time.time()))
    answer, reply, keep = await _begun(request, state, body, sent)
    if body.stream:
        pieces = reply.events(answer, keep)
        if body.store is not False:
            pieces = _written(pieces, state, sent, body)
        return AnswerResponse(answer, pieces, EVENTS, state.settings.write_timeout)
    async with answer:
        await reply.read(answer)
    return Response(await keep(), media_type="application/json")


async def _begun(
    request: Request, state: ServerState, body: ResponsesRequest, sent: SentEvents
) -> tuple[Answer, ResponseReply, Keep]:
    """Ask for an answer. Returns it with what makes a response of it, and what keeps that at its end, as JSON."""
    description, model = await state.model(body.model)
    form, options = speech_of(body.modalities, body.audio, body.stream, description, state)
    before = await _before(body, state)
    known = {call["id"] for message in before for call in message.get("tool_calls", ())}
    asked = await state.media.messages(turns_of(body.input), description.max_media, known)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    answer = await Answer.begin(
        request,
        state,
        body,
        {"messages": [*instructions, *before, *asked], **body.tool_options()},
        FIELDS,
        params=state.stage_params(body.model, body.params_by_stage(), description, body.stage_fields()),
        **options,
    )
    reply = ResponseReply(sent, model, form, body, description)

    async def keep() -> bytes:
        content = msgspec.json.encode(reply.object("completed"))
        if body.store is not False:
            conversation = [*before, *asked, reply.message()]
            size = _size(conversation)
            kept = KeptResponse(len(content), conversation, size)
            await asyncio.to_thread(state.responses.add, sent.id, kept, len(content) + size, content)
        return content

    return answer, reply, keep


async def _written(
    pieces: AsyncIterator[bytes], state: ServerState, sent: SentEvents, body: ResponsesRequest
) -> AsyncIterator[bytes]:
    """Write down the events of a stream before they are sent, so that any process can go on with it."""
    head = msgspec.json.encode(StreamHead(msgspec.json.encode(body), sent.created))
    journal = await asyncio.to_thread(state.streams.begin, sent.id, head + END)
    try:
        async for piece in pieces:
            if journal is not None:
                journal.append(piece)
            yield piece
    finally:
        if journal is not None:
            journal.close()


async def retrieve(request: Request, state: ServerState, query: RetrieveQuery, response_id: str) -> Response:
    """A response that is still kept; or the rest of its stream, also if the process that sent it has died."""
    if query.stream:
        return await _resumed(request, state, response_id, _last_event(request, query))
    if query.starting_after is not None:
        raise bad_field("starting_after", "starting_after needs stream=true.")
    found = await state.responses.get(response_id)
    headers = {"content-length": str(found.size)}
    return StreamingResponse(state.responses.pieces(response_id, found.size), 200, headers, "application/json")


def _last_event(request: Request, query: RetrieveQuery) -> int:
    """The number of the last event that the client has, -1 for none. Browsers repeat the URL and add the header."""
    given = request.headers.get(LAST_EVENT)
    if given is None:
        return -1 if query.starting_after is None else query.starting_after
    if not EVENT_ID.fullmatch(given):
        raise bad_field(LAST_EVENT, f"{LAST_EVENT} must be the id of an event of this stream: a number.")
    return int(given)


async def _resumed(request: Request, state: ServerState, response_id: str, after: int) -> Response:
    journal = await asyncio.to_thread(state.streams.find, response_id)
    if journal is None:
        await state.responses.get(response_id)
        message = f"The stream of {response_id[:100]!r} is not kept any more, or there was none: leave out stream."
        raise bad_field("stream", message, "response_not_resumable")
    pieces = _rest(request, state, response_id, journal, after)
    return AnswerResponse(None, pieces, EVENTS, state.settings.write_timeout)


async def _rest(
    request: Request, state: ServerState, response_id: str, journal: Journal, after: int
) -> AsyncIterator[bytes]:
    """The events after one: those in the journal and, as long as another process writes, those that it writes.

    If none does before the end, the answer is made again from the request, and what was sent of it is left out.
    """
    with contextlib.closing(journal):
        parts = journal.follow()
        head = msgspec.json.decode(await anext(parts), type=StreamHead)
        sent = SentEvents(response_id, head.created)
        async for part in parts:
            if sent.add(part) > after:
                yield part
            if sent.ended:
                return
        reserve(len(head.body))
        answer, reply, keep = await _begun(request, state, await asyncio.to_thread(BODY.decoded, head.body), sent)
        async with answer:
            async for piece in reply.events(answer, keep):
                if piece:
                    journal.append(piece)
                    yield piece


async def delete(request: Request, state: ServerState, response_id: str) -> Response:
    """Forget a response."""
    if (journal := await asyncio.to_thread(state.streams.find, response_id)) is not None:
        journal.remove()
        journal.close()
        await asyncio.to_thread(state.responses.remove, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})
    return json_response(await state.responses.delete(response_id))


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
    found = await asyncio.to_thread(state.responses.find, body.previous_response_id)
    if found is None:
        message = f"{state.responses.unknown(body.previous_response_id).message} Send its items again."
        raise bad_field("previous_response_id", message, "previous_response_not_found")
    reserve(found.conversation_bytes)
    return found.conversation
