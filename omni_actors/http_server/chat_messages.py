"""The messages of a chat, as OpenAI defines them, with vLLM's parts for sound and video by URL."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from omni_actors.http_server.fields import (
    ABSENT,
    Anything,
    LongString,
    OptionalLongString,
    OptionalText,
    Strict,
    Text,
    is_null,
)
from omni_actors.protocol.tools import MAX_CALLS, CallId, Json, ToolName

MAX_MESSAGES = 1024
MAX_PARTS = 256


class Part(Strict, frozen=True, tag_field="type"):
    """A part of a message's content."""


class TextPart(Part, frozen=True, tag="text"):
    """Text in a message."""

    text: Text


class InputText(Part, frozen=True, tag="input_text"):
    """Text for the model, in a response or a realtime session."""

    text: Text


class OutputText(Part, frozen=True, tag="output_text"):
    """Text of the model, as it came, in a response or a realtime session."""

    text: Text
    annotations: Anything = ABSENT  # ignored, as is the next one
    logprobs: Anything = ABSENT


class AudioData(Strict, frozen=True):
    """A sound in the body itself."""

    data: LongString  # base64 of a file
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "mp4", "webm"]


class AudioPart(Part, frozen=True, tag="input_audio"):
    """A sound in a message, as OpenAI's clients send it."""

    input_audio: AudioData


class Url(Strict, frozen=True):
    """Where a medium lies."""

    url: LongString  # data: URI, or https: of an allowed host
    detail: str | None = None  # of OpenAI's images; ignored


class ImageUrlPart(Part, frozen=True, tag="image_url"):
    """A picture in a message."""

    image_url: Url


class AudioUrlPart(Part, frozen=True, tag="audio_url"):
    """A sound in a message, by URL."""

    audio_url: Url


class VideoUrlPart(Part, frozen=True, tag="video_url"):
    """A video in a message."""

    video_url: Url


class FileReference(Strict, frozen=True):
    """A file that was uploaded before (`file_id`) or is in the body itself (`file_data`)."""

    file_id: str | None = None
    file_data: OptionalLongString = ABSENT  # data: URI
    filename: str | None = None

    @property
    def is_inline(self) -> bool:
        """Whether `file_data` is given."""
        return not is_null(self.file_data)


class FilePart(Part, frozen=True, tag="file"):
    """A file in a message; its content decides what it is."""

    file: FileReference


AnyPart = TextPart | AudioPart | ImageUrlPart | AudioUrlPart | VideoUrlPart | FilePart
UserContent = Text | Annotated[list[AnyPart], Meta(max_length=MAX_PARTS)]
TextContent = Text | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]


class RoleMessage(Strict, frozen=True, tag_field="role"):
    """A message of a chat."""

    name: str | None = None  # ignored


class UserMessage(RoleMessage, frozen=True, kw_only=True, tag="user"):
    """What the user says: text, or parts with media."""

    content: UserContent


class SystemMessage(RoleMessage, frozen=True, kw_only=True, tag="system"):
    """Instructions to the model, text only."""

    content: TextContent


class DeveloperMessage(SystemMessage, frozen=True, kw_only=True, tag="developer"):
    """The same, by its newer name."""


class AudioReference(Strict, frozen=True):
    """The audio of an earlier answer, by the id that came with it, or all that came with it."""

    id: str
    data: OptionalLongString = ABSENT  # ignored: the model is given what it said, not how it sounded
    expires_at: int | None = None
    transcript: OptionalText = None


class CalledFunction(Strict, frozen=True):
    """What a call calls, with the JSON of its arguments."""

    name: ToolName
    arguments: Json = ""


class CalledTool(Strict, frozen=True):
    """A call of an earlier answer, as it came, whole or put together from a stream."""

    id: CallId
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # of a stream; ignored


class ToolMessage(RoleMessage, frozen=True, kw_only=True, tag="tool"):
    """What a call of the last answer gave."""

    content: TextContent
    tool_call_id: CallId


class AssistantMessage(RoleMessage, frozen=True, kw_only=True, tag="assistant"):
    """An earlier answer as it came, or what matters of it: its text, or the id of its audio."""

    content: TextContent | None = None
    audio: AudioReference | None = None
    refusal: str | None = None
    annotations: Anything = ABSENT  # of OpenAI's web search; ignored
    provider_specific_fields: Anything = ABSENT  # of LiteLLM, which adds it to every answer; ignored
    reasoning_content: Anything = ABSENT  # ignored
    function_call: None = None
    tool_calls: Annotated[list[CalledTool], Meta(max_length=MAX_CALLS)] | None = None


AnyMessage = UserMessage | SystemMessage | DeveloperMessage | AssistantMessage | ToolMessage
