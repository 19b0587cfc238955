"""What clients of the Live API send: each of their events, and the configuration of a session."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from omni_actors.http_server.bodies import BodyText, Nothing, Strict
from omni_actors.http_server.generation import FlatChoice, FlatTools, ToolMode, VoiceId
from omni_actors.http_server.realtime.config import ClientEvent, GivenItem, Instructions, new_id
from omni_actors.http_server.realtime.conversation import AnyItem, ItemPart, MessageItem
from omni_actors.http_server.realtime.formats import WireFormat
from omni_actors.protocol.fields import PositiveInt

MAX_HISTORY = 128  # messages before a session, as OpenAI allows
MAX_APPENDED = 8192  # characters of a context that is appended; OpenAI allows 500 tokens


# ---------------------------------------------------------------------------------------------------------------------
# The configuration


class HistoryText(Strict, frozen=True):
    """The text of an earlier message."""

    text: BodyText
    type: Literal["input_text", "output_text", "text"] | None = None


class HistoryMessage(Strict, frozen=True):
    """A message of an earlier conversation; `id` and `status` are without effect."""

    role: Literal["developer", "user", "assistant"]
    content: Annotated[list[HistoryText], Meta(min_length=1, max_length=1)]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None

    def item(self) -> MessageItem:
        """The message as an item of a realtime session."""
        part = ItemPart("output_text" if self.role == "assistant" else "input_text", self.content[0].text)
        return MessageItem(new_id("item"), "system" if self.role == "developer" else self.role, [part])


class Backend(Strict, frozen=True, kw_only=True):
    """The model, the tools and the instructions of delegated work; what an update leaves out stays."""

    model: str | None = None
    instructions: Instructions | None = None
    tools: FlatTools | None = None
    tool_choice: ToolMode | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: PositiveInt | None = None
    reasoning: Any = None  # without effect, as are the next two
    text: Any = None
    service_tier: Any = None


class Delegation(Strict, frozen=True, kw_only=True, tag_field="type"):
    """Who does what the model delegates; the delay is without effect, as the server makes no acknowledgements."""

    acknowledgement_delay_ms: Annotated[int, Meta(ge=0)] | None = None


class ClientDelegation(Delegation, frozen=True, kw_only=True, tag="client"):
    """The client does."""


class ResponsesDelegation(Delegation, frozen=True, kw_only=True, tag="responses"):
    """The server does, with the client's tools."""

    responses: Backend


class LiveOutput(Strict, frozen=True):
    """The voice."""

    voice: str | VoiceId | None = None


class ForkAudio(Strict, frozen=True):
    """How sound travels in both directions."""

    format: WireFormat | None = None


class LiveAudio(ForkAudio, frozen=True):
    """The same, and the voice."""

    output: LiveOutput | None = None


class LiveFields(Strict, frozen=True, kw_only=True):
    """The `session` of `session.start`."""

    model: str
    audio: LiveAudio | None = None
    delegation: ClientDelegation | ResponsesDelegation | None = None
    input: Annotated[list[HistoryMessage], Meta(max_length=MAX_HISTORY)] | None = None
    instructions: Instructions | None = None
    store: bool | None = None
    safety_identifier: str | None = None  # without effect
    client: None = None
    triggers: Nothing = None


class LiveUpdate(Strict, frozen=True, kw_only=True):
    """The `session` of `session.update`."""

    delegation: ClientDelegation | ResponsesDelegation | None = None
    triggers: Nothing = None


class ForkFields(Strict, frozen=True, kw_only=True):
    """The `session` of a fork; what it leaves out is as it was."""

    audio: ForkAudio | None = None
    delegation: ResponsesDelegation | None = None
    store: bool | None = None
    client: None = None


class StoredLive(Struct):
    """What a fork of a session begins with."""

    fields: LiveFields
    items: list[AnyItem]


# ---------------------------------------------------------------------------------------------------------------------
# Events


class StartLive(ClientEvent, frozen=True, kw_only=True, tag="session.start"):
    """Begin the session: the first event, and no other one."""

    session: LiveFields


class StartFork(ClientEvent, frozen=True, kw_only=True, tag="session.start"):
    """Begin a fork: the first event, and no other one."""

    session: ForkFields


class UpdateLive(ClientEvent, frozen=True, kw_only=True, tag="session.update"):
    """Change how work is delegated."""

    session: LiveUpdate


class AppendInput(ClientEvent, frozen=True, kw_only=True, tag="session.input_audio.append"):
    """The next sound of the user."""

    audio: bytes


class MuteInput(ClientEvent, frozen=True, kw_only=True, tag="session.input_audio.mute"):
    """Take silence for the sound of the user from now on."""


class UnmuteInput(ClientEvent, frozen=True, kw_only=True, tag="session.input_audio.unmute"):
    """Hear the user again."""


class AppendContext(ClientEvent, frozen=True, kw_only=True):
    """Tell the model something, perhaps the result of a delegation."""

    delegation_id: str | None
    content: Annotated[str, Meta(min_length=1, max_length=MAX_APPENDED)]


class AppendInstructions(AppendContext, frozen=True, kw_only=True, tag="session.instructions.append"):
    """What to do from now on."""


class AppendThinking(AppendContext, frozen=True, kw_only=True, tag="session.thinking.append"):
    """What to know, and not to say now."""


class AppendCommentary(AppendContext, frozen=True, kw_only=True, tag="session.commentary.append"):
    """What to say now."""


class CreateBackendItem(ClientEvent, frozen=True, kw_only=True, tag="response.item.create"):
    """The result of a call, or a message, for the model that does delegated work."""

    item: GivenItem


class ContinueWork(ClientEvent, frozen=True, kw_only=True, tag="response.create"):
    """Go on with delegated work."""


class CloseLive(ClientEvent, frozen=True, kw_only=True, tag="session.close"):
    """End the session."""


SidebandEvent = (
    UpdateLive
    | MuteInput
    | UnmuteInput
    | AppendInstructions
    | AppendThinking
    | AppendCommentary
    | CreateBackendItem
    | ContinueWork
    | CloseLive
)
LiveEvent = StartLive | AppendInput | SidebandEvent
