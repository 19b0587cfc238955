"""The events of a session: those that a client may send, and those that the server sends."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from omni_actors.http_server.chat_messages import MAX_MESSAGES, MAX_PARTS, InputText, OutputText, Part
from omni_actors.http_server.decoding import MAX_VALUES, check_bounds, decode
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.fields import Strict, Text
from omni_actors.http_server.realtime.config import AnswerFields, Fields, OrNull, OutputAudioFields, SessionFields
from omni_actors.protocol.tools import CallId, Json, ToolName

MAX_ID = 128
Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
EventId = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]


# ---------------------------------------------------------------------------------------------------------------------
# Items


class InputSound(Part, frozen=True, tag="input_audio"):
    """Sound of the user, base64 of PCM."""

    audio: bytes
    transcript: None = None


class OutputSound(Part, frozen=True, tag="output_audio"):
    """A spoken answer of an earlier conversation, by its transcript: the model is shown no sound of its own."""

    transcript: Text
    audio: None = None


AnyContent = InputText | InputSound | OutputText | OutputSound


class GivenMessage(Strict, frozen=True, tag_field="type", tag="message"):
    """An item of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[AnyContent], Meta(min_length=1, max_length=MAX_PARTS)]
    id: Id | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None  # without effect


class FunctionCall(Strict, frozen=True, tag_field="type", tag="function_call"):
    """A call of an earlier conversation."""

    name: ToolName
    arguments: Json
    call_id: CallId | None = None
    id: Id | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None  # without effect


class FunctionCallOutput(Strict, frozen=True, tag_field="type", tag="function_call_output"):
    """What a call has brought."""

    call_id: CallId
    output: Text
    id: Id | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None  # without effect


GivenItem = GivenMessage | FunctionCall | FunctionCallOutput


class ItemReference(Strict, frozen=True, tag_field="type", tag="item_reference"):
    """An item of the conversation, by its id."""

    id: Id


# ---------------------------------------------------------------------------------------------------------------------
# Events of the client


class ClientEvent(Strict, frozen=True, kw_only=True, tag_field="type"):
    """An event; an error that it causes names its `event_id`."""

    event_id: EventId | None = None


class UpdateSession(ClientEvent, frozen=True, kw_only=True, tag="session.update"):
    """Change the session's configuration."""

    session: SessionFields


class AppendAudio(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.append"):
    """Add sound of the user."""

    audio: bytes


class CommitAudio(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.commit"):
    """Make an item of the sound in the buffer."""


class ClearAudio(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.clear"):
    """Discard the sound in the buffer."""


class CreateItem(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.create"):
    """Add an item: at the end, behind `previous_item_id`, or first if that is "root"."""

    item: GivenItem
    previous_item_id: Id | None = None


class RetrieveItem(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.retrieve"):
    """Ask for an item with its sound."""

    item_id: Id


class DeleteItem(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.delete"):
    """Remove an item."""

    item_id: Id


class TruncateItem(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.truncate"):
    """Say how much of a spoken answer the user has heard."""

    item_id: Id
    content_index: Annotated[int, Meta(ge=0)]
    audio_end_ms: Annotated[int, Meta(ge=0, le=86_400_000)]


class ResponseAudio(Fields, frozen=True):
    """The sound of a single response; there is nothing to set about its input."""

    output: OrNull[OutputAudioFields] = OutputAudioFields()


class ResponseFields(AnswerFields, frozen=True, kw_only=True):
    """What `response.create` may set for one response.

    Args:
        conversation: "none" for a response that does not become part of the conversation.
        input: what to answer in place of the conversation.
    """

    audio: OrNull[ResponseAudio] = ResponseAudio()
    conversation: OrNull[Literal["auto", "none"]] = "auto"
    input: Annotated[list[GivenItem | ItemReference], Meta(max_length=MAX_MESSAGES)] | None = None
    metadata: Metadata | None = None


class CreateResponse(ClientEvent, frozen=True, kw_only=True, tag="response.create"):
    """Answer the conversation."""

    response: ResponseFields | None = None


class CancelResponse(ClientEvent, frozen=True, kw_only=True, tag="response.cancel"):
    """End the running response."""

    response_id: Id | None = None


AnyEvent = (
    UpdateSession
    | AppendAudio
    | CommitAudio
    | ClearAudio
    | CreateItem
    | RetrieveItem
    | DeleteItem
    | TruncateItem
    | CreateResponse
    | CancelResponse
)


class _Envelope(Struct):
    """What an event that does not fit is searched for."""

    event_id: Any = None


def parse(data: bytes) -> AnyEvent:
    """Decode an event. Raises `HttpError` 400 or 413 with the field at fault."""
    check_bounds(data, MAX_VALUES)
    event: AnyEvent = decode(data, AnyEvent)  # type: ignore[arg-type]  # a union is no class
    return event


def event_id_of(data: bytes) -> str | None:
    """The id of an event that could not be decoded, if it has one."""
    try:
        found = msgspec.json.decode(data, type=_Envelope).event_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found[:512] if isinstance(found, str) else None


# ---------------------------------------------------------------------------------------------------------------------
# Events of the server. Tests hold each of them against the types of the `openai` package.

Event = dict[str, Any]


def new_id(kind: str) -> str:
    """An id such as `item_3f2a...`."""
    return f"{kind}_{uuid.uuid4().hex[:24]}"


def event(kind: str, **fields: Any) -> Event:
    """An event of the server; bytes become base64."""
    return {"type": kind, "event_id": new_id("event"), **fields}


def error_event(error: HttpError, event_id: str | None = None) -> Event:
    """Say that something was refused or has failed. The session goes on.

    Args:
        event_id: of the client's event that is at fault.
    """
    return event("error", error={**error.body()["error"], "event_id": event_id})
