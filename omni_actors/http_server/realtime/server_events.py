"""The events that the server sends. Tests hold each of them against the types of the `openai` package."""

from __future__ import annotations

import uuid
from typing import Any, Literal

from msgspec import Struct, field

from omni_actors.http_server.errors import HttpError

Json = dict[str, Any]


def new_id(kind: str) -> str:
    """An id such as `item_3f2a...`."""
    return f"{kind}_{uuid.uuid4().hex[:24]}"


class ServerEvent(Struct, frozen=True, kw_only=True, tag_field="type"):
    """An event with its own id."""

    event_id: str = field(default_factory=lambda: new_id("event"))


class SessionCreated(ServerEvent, frozen=True, kw_only=True, tag="session.created"):
    """The first event of a session: its configuration."""

    session: Json


class SessionUpdated(ServerEvent, frozen=True, kw_only=True, tag="session.updated"):
    """The configuration after `session.update`."""

    session: Json


class ErrorBody(Struct, frozen=True, kw_only=True):
    """What is wrong; `event_id` is the id of the client's event that is at fault."""

    type: str
    message: str
    code: str | None = None
    param: str | None = None
    event_id: str | None = None


class Error(ServerEvent, frozen=True, kw_only=True, tag="error"):
    """Something was refused or has failed. The session goes on."""

    error: ErrorBody

    @classmethod
    def of(cls, error: HttpError, event_id: str | None = None) -> Error:
        """Convert an error of the HTTP routes."""
        body = ErrorBody(type=error.kind, message=error.message, code=error.code, param=error.param, event_id=event_id)
        return cls(error=body)


# ---------------------------------------------------------------------------------------------------------------------
# The user's sound


class AudioCommitted(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.committed"):
    """The buffer has become an item."""

    item_id: str
    previous_item_id: str | None


class AudioCleared(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.cleared"):
    """The buffer is empty."""


class SpeechStarted(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.speech_started"):
    """The user speaks; milliseconds count from the first sound of the session."""

    audio_start_ms: int
    item_id: str


class SpeechStopped(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.speech_stopped"):
    """The user's turn is over."""

    audio_end_ms: int
    item_id: str


class OfTurn(ServerEvent, frozen=True, kw_only=True):
    """What is written down of a turn."""

    item_id: str
    content_index: Literal[0] = 0


class TurnDelta(OfTurn, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.delta"):
    """The next text of a turn's transcript."""

    delta: str


class TurnTranscribed(OfTurn, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.completed"):
    """The whole transcript of a turn."""

    transcript: str
    usage: Json


class TurnNotTranscribed(OfTurn, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.failed"):
    """There will be no transcript of a turn; its answer is not affected."""

    error: Json


# ---------------------------------------------------------------------------------------------------------------------
# The conversation


class ItemAdded(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.added"):
    """An item has become part of the conversation; that of an answer is still empty."""

    item: Json
    previous_item_id: str | None


class ItemDone(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.done"):
    """An item is complete."""

    item: Json
    previous_item_id: str | None


class ItemRetrieved(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.retrieved"):
    """An item with its sound."""

    item: Json


class ItemDeleted(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.deleted"):
    """An item is no part of the conversation any more."""

    item_id: str


class ItemTruncated(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.truncated"):
    """A spoken answer ends where the user stopped hearing it."""

    item_id: str
    content_index: int
    audio_end_ms: int


# ---------------------------------------------------------------------------------------------------------------------
# Responses


class ResponseCreated(ServerEvent, frozen=True, kw_only=True, tag="response.created"):
    """An answer begins."""

    response: Json


class ResponseDone(ServerEvent, frozen=True, kw_only=True, tag="response.done"):
    """An answer has ended, however it did."""

    response: Json


class RateLimits(ServerEvent, frozen=True, kw_only=True, tag="rate_limits.updated"):
    """No limits: this server counts neither requests nor tokens over time."""

    rate_limits: tuple[Json, ...] = ()


class OfResponse(ServerEvent, frozen=True, kw_only=True):
    """What belongs to the item of a response."""

    response_id: str
    item_id: str
    output_index: int = 0


class OutputItemAdded(ServerEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """The item of a response, still empty."""

    response_id: str
    output_index: int = 0
    item: Json


class OutputItemDone(ServerEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """The item of a response, complete."""

    response_id: str
    output_index: int = 0
    item: Json


class PartAdded(OfResponse, frozen=True, kw_only=True, tag="response.content_part.added"):
    """The content of the item begins."""

    content_index: Literal[0] = 0
    part: Json


class PartDone(OfResponse, frozen=True, kw_only=True, tag="response.content_part.done"):
    """The content of the item is complete."""

    content_index: Literal[0] = 0
    part: Json


class TextDelta(OfResponse, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """The next text of a written answer."""

    content_index: Literal[0] = 0
    delta: str


class TextDone(OfResponse, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The whole text of a written answer."""

    content_index: Literal[0] = 0
    text: str


class TranscriptDelta(OfResponse, frozen=True, kw_only=True, tag="response.output_audio_transcript.delta"):
    """The next text of a spoken answer; it runs ahead of the sound."""

    content_index: Literal[0] = 0
    delta: str


class TranscriptDone(OfResponse, frozen=True, kw_only=True, tag="response.output_audio_transcript.done"):
    """The whole text of a spoken answer."""

    content_index: Literal[0] = 0
    transcript: str


class AudioDelta(OfResponse, frozen=True, kw_only=True, tag="response.output_audio.delta"):
    """The next sound, encoded as base64."""

    content_index: Literal[0] = 0
    delta: bytes


class AudioDone(OfResponse, frozen=True, kw_only=True, tag="response.output_audio.done"):
    """The sound is complete."""

    content_index: Literal[0] = 0


class ArgumentsDelta(ServerEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """The next piece of the arguments of a call."""

    response_id: str
    item_id: str
    output_index: int
    call_id: str
    delta: str


class ArgumentsDone(ServerEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """A call is complete."""

    response_id: str
    item_id: str
    output_index: int
    call_id: str
    name: str
    arguments: str
