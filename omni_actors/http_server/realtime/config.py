"""The configuration of a session, and its events: those of the client and those of the server.

A field that would change the answer and is not supported takes only the value that asks for nothing, mostly null. It is
refused alone: the other fields of a `session.update` take effect.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from omni_actors.http_server.bodies import (
    MAX_TEXT,
    MAX_TOKENS,
    MAX_VALUES,
    BodyText,
    LongString,
    Nothing,
    OptionalText,
    Strict,
    check_bounds,
    decode,
)
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.generation import (
    MAX_MESSAGES,
    MAX_PARTS,
    FlatChoice,
    FlatTool,
    FlatTools,
    InputText,
    Language,
    OutputText,
    Part,
    Source,
    Speed,
    ToolMode,
    TranscriptionPrompt,
    VoiceId,
    tool_options,
    voice_name,
)
from omni_actors.http_server.realtime.formats import AnyFormat, WireFormat, wire_format
from omni_actors.protocol.fields import Seed
from omni_actors.protocol.payloads import CallId, Json, StageParams, ToolName

T = TypeVar("T")

SessionKind = Literal["realtime", "transcription"]
Modality = Literal["text", "audio"]
TextOrAudio = Annotated[list[Modality], Meta(min_length=1, max_length=2)]
Instructions = Annotated[str, Meta(max_length=MAX_TEXT)]
# Not a Literal: in a union with a number, msgspec takes "inf" for an infinite one.
OutputTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | Annotated[str, Meta(pattern=r"^inf\Z")]
Milliseconds = Annotated[int, Meta(ge=0, le=60_000)]

# Fields of `AnswerFields` that a configuration has under the same name, and those of it that are shown as they are.
ANSWER_FIELDS = ["tools", "tool_choice", "parallel_tool_calls", "instructions", "max_output_tokens"]
ANSWER_FIELDS += ["seed", "stage_params"]
SHOWN = ["model", "instructions", "tool_choice", "parallel_tool_calls", "max_output_tokens", "truncation", "seed"]
MAX_ID = 128
MAX_REFUSED = 16  # fields of an update, before all of it is
if TYPE_CHECKING:
    OrNull = Annotated[T, "null"]
else:
    OrNull = Annotated[T | None, "null"]


class Fields(Strict, frozen=True, kw_only=True):
    """Fields that a client may set. Null is as good as absent: each has its default in place of it."""

    def __post_init__(self) -> None:
        for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            if getattr(self, name) is None and default is not None:
                msgspec.structs.force_setattr(self, name, default)


class ServerVad(Fields, frozen=True, kw_only=True, tag_field="type", tag="server_vad"):
    """The server finds the turns of the user in the sound.

    Args:
        threshold: probability of speech from which a turn begins.
        prefix_padding_ms: sound before the beginning that belongs to the turn.
        silence_duration_ms: silence after which a turn is over.
        create_response: answer a turn when it is over.
        interrupt_response: cancel the running answer when a turn begins.
        idle_timeout_ms: silence after an answer was heard that is answered, too; `None` for none.
    """

    threshold: OrNull[Annotated[float, Meta(ge=0, le=1)]] = 0.5
    prefix_padding_ms: OrNull[Milliseconds] = 300
    silence_duration_ms: OrNull[Annotated[int, Meta(ge=64, le=60_000)]] = 500
    create_response: OrNull[bool] = True
    interrupt_response: OrNull[bool] = True
    idle_timeout_ms: Annotated[int, Meta(ge=1000, le=60_000)] | None = None


class SemanticVad(Fields, frozen=True, kw_only=True, tag_field="type", tag="semantic_vad"):
    """Turns of the user that end when all seems said. They are found by silence, too, and sessions show that.

    Args:
        eagerness: how soon that is; `auto` is `medium`.
    """

    eagerness: OrNull[Literal["low", "medium", "high", "auto"]] = "auto"
    create_response: OrNull[bool] = True
    interrupt_response: OrNull[bool] = True

    def by_silence(self) -> ServerVad:
        """What is done instead."""
        return ServerVad(
            silence_duration_ms=SILENCE_MS[self.eagerness],
            create_response=self.create_response,
            interrupt_response=self.interrupt_response,
        )


SILENCE_MS = {"low": 800, "medium": 500, "auto": 500, "high": 300}


class Transcription(Strict, frozen=True, omit_defaults=True):
    """The user's turns are written down, by the pipeline itself.

    Sessions show what is set of it: clients have stumbled over fields that are newer than they.

    Args:
        model: any name; the session's model writes.
        language: of the user, such as "en".
        prompt: what was said before, or how names are spelt.
    """

    model: Annotated[str, Meta(max_length=MAX_ID)] | None = None
    language: Language | None = None
    prompt: TranscriptionPrompt | None = None
    delay: None = None
    keywords: Nothing = None
    languages: Nothing = None


class InputAudioFields(Strict, frozen=True):
    """What a client may set about the user's sound. Null turns detection and transcription off."""

    format: AnyFormat | None = None
    turn_detection: ServerVad | SemanticVad | UnsetType | None = UNSET
    transcription: Transcription | UnsetType | None = UNSET
    noise_reduction: Any = None  # without effect, as is `tracing` of the session


class OutputAudioFields(Strict, frozen=True):
    """What a client may set about the sound of answers."""

    format: AnyFormat | None = None
    voice: str | VoiceId | None = None
    speed: Speed | None = None


class AudioFields(Fields, frozen=True, kw_only=True):
    """Both directions."""

    input: OrNull[InputAudioFields] = InputAudioFields()
    output: OrNull[OutputAudioFields] = OutputAudioFields()


class AnswerFields(Fields, frozen=True, kw_only=True):
    """What a session and a single response may both set. `seed` and `stage_params` are extensions."""

    instructions: Instructions | None = None
    output_modalities: TextOrAudio | None = None
    max_output_tokens: OutputTokens | None = None
    tools: FlatTools | None = None
    tool_choice: ToolMode | FlatChoice | None = None
    prompt: None = None
    reasoning: None = None
    parallel_tool_calls: bool | None = None
    seed: Seed | None = None
    stage_params: dict[str, StageParams] | None = None


class SessionFields(AnswerFields, frozen=True, kw_only=True):
    """The `session` of `session.update`; what is absent or null stays as it is."""

    type: SessionKind | None = None
    model: str | None = None
    audio: OrNull[AudioFields] = AudioFields()
    include: Nothing = None
    tracing: Any = None
    truncation: Literal["auto", "disabled"] | None = None


class Pipeline(Struct, frozen=True):
    """What a session has to know of the pipeline that answers.

    Args:
        voice_aliases: further names of them.
        speaks: whether it answers in sound, at `RATE`.
        max_audios: how many pieces of sound a prompt may have; `None` for no limit.
        max_images: the same of pictures.
        audio_seconds: sound that may wait in the buffer, and that the conversation may hold.
        detects: whether the server can find turns.
        called: over WebRTC or as a Live session: sound has one format, answers are played in time, and a microphone
            is always open.
    """

    voices: tuple[str, ...]
    stages: tuple[str, ...]
    speaks: bool
    max_audios: int | None = None
    max_images: int | None = None
    audio_seconds: float = 300.0
    voice_aliases: dict[str, str] = {}
    detects: bool = True
    called: bool = False


class SessionConfig(Struct, frozen=True, kw_only=True):
    """The effective configuration of a session, or of one response. One that transcribes does that only."""

    model: str
    kind: SessionKind = "realtime"
    output: Modality
    voice: str | None = None
    speed: float = 1.0
    instructions: str = ""
    max_output_tokens: int | str = "inf"
    turn_detection: ServerVad | None = None
    transcription: Transcription | None = None
    truncation: Literal["auto", "disabled"] = "auto"
    input_format: WireFormat = WireFormat()
    output_format: WireFormat = WireFormat()
    tools: list[FlatTool] = []
    tool_choice: ToolMode | FlatChoice = "auto"
    parallel_tool_calls: bool | None = None
    seed: int | None = None
    stage_params: dict[str, StageParams] = {}

    def with_answer(self, fields: SessionFields | ResponseFields, pipeline: Pipeline, where: str) -> SessionConfig:
        """The configuration after what a session and a response may both set. Raises `HttpError` 400."""
        audio = fields.audio.output
        if len(fields.output_modalities or "1") != 1:
            message = 'Ask for ["audio"], which comes with its transcript, or for ["text"].'
            raise bad_field(f"{where}.output_modalities", message)
        output = fields.output_modalities[0] if fields.output_modalities else self.output
        if output == "audio" and not pipeline.speaks:
            raise bad_field(f"{where}.output_modalities", "This pipeline answers in text only.", "unknown_modality")
        voice = self.voice
        if audio.voice is not None:
            place = f"{where}.audio.output.voice"
            voice = voice_name(audio.voice, pipeline.voices, pipeline.voice_aliases, place)
            if voice not in (None, *pipeline.voices):
                message = f"There is no voice {voice!r:.66}; the voices are {', '.join(pipeline.voices) or 'none'}."
                raise bad_field(place, message, "unknown_voice")
        stage_params = _given(fields.stage_params, self.stage_params)
        for stage in stage_params:
            if stage not in pipeline.stages:
                message = f"There is no stage {stage[:64]!r}; the stages are {', '.join(pipeline.stages)}."
                raise bad_field(f"{where}.stage_params", message)
        tools, choice = _given(fields.tools, self.tools), _given(fields.tool_choice, self.tool_choice)
        tool_options(tools, choice, None, f"{where}.tool_choice")
        given = {name: value for name in ANSWER_FIELDS if (value := getattr(fields, name)) is not None}
        asked = audio.format if not pipeline.called else None
        wire = wire_format(asked, self.output_format, f"{where}.audio.output.format")
        given["speed"] = _given(audio.speed, self.speed)
        return msgspec.structs.replace(self, **given, output=output, voice=voice, output_format=wire)

    def updated(self, given: dict[str, Any], pipeline: Pipeline) -> tuple[SessionConfig, Sequence[HttpError]]:
        """The configuration after `session.update`, and why fields were left out. Raises `HttpError` 400 for all."""
        refused: list[HttpError] = []
        while True:
            try:
                return self._updated(decode(given, SessionFields, "session"), pipeline), refused
            except HttpError as error:
                path = (error.param or "").partition("[")[0].split(".")[1:]
                rest = _without(given, path)
                if rest == given or len(refused) == MAX_REFUSED:
                    raise
                if error.code != "missing_required_parameter" or error.param not in {one.param for one in refused}:
                    refused.append(error)
                given = rest

    def _updated(self, fields: SessionFields, pipeline: Pipeline) -> SessionConfig:
        config = self.with_answer(fields, pipeline, "session")
        if fields.model is not None and fields.model != self.model:
            message = f"The model of a session stays what it was at its start: {self.model}."
            raise HttpError(400, message, param="session.model", code="model_not_changeable")
        heard = fields.audio.input
        turn_detection = self.turn_detection if heard.turn_detection is UNSET else heard.turn_detection
        if isinstance(turn_detection, SemanticVad):
            turn_detection = turn_detection.by_silence()
        if turn_detection is not None and not pipeline.detects:
            message = "This server cannot find turns: install omni_actors[realtime], or send null and commit turns."
            raise bad_field("session.audio.input.turn_detection", message, "unsupported_value")
        kind = _given(fields.type, self.kind)
        transcription = self.transcription if heard.transcription is UNSET else heard.transcription
        asked = heard.format if not pipeline.called else None
        return msgspec.structs.replace(
            config,
            kind=kind,
            turn_detection=turn_detection,
            transcription=transcription or (Transcription() if kind == "transcription" else None),
            truncation=_given(fields.truncation, self.truncation),
            input_format=wire_format(asked, self.input_format, "session.audio.input.format"),
        )

    def shown(self, session_id: str, expires: int) -> dict[str, Any]:
        """The `session` of `session.created` and `session.updated`."""
        heard = {
            "format": self.input_format,
            "transcription": self.transcription,
            "noise_reduction": None,
            "turn_detection": self.turn_detection,
        }
        common = {"type": self.kind, "id": session_id, "expires_at": expires, "include": None}
        if self.kind == "transcription":
            return {**common, "object": "realtime.transcription_session", "audio": {"input": heard}}
        return {
            **common,
            "object": "realtime.session",
            **{name: getattr(self, name) for name in SHOWN},
            "output_modalities": [self.output],
            "tools": [{"type": "function", **tool.definition()} for tool in self.tools],
            **dict.fromkeys(("tracing", "prompt")),
            "stage_params": {stage: params.given() for stage, params in self.stage_params.items()},
            "audio": {
                "input": heard,
                "output": {"format": self.output_format, "voice": self.voice, "speed": self.speed},
            },
        }


def _without(fields: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Fields without the one at a path; if it is not there, or says what holds it, without that."""
    name, *rest = path or [""]
    inner = fields.get(name)
    if rest and rest != ["type"] and isinstance(inner, dict) and rest[0] in inner:
        return {**fields, name: _without(inner, rest)}
    return {key: value for key, value in fields.items() if key != name}


def _given(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
EventId = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]


# ---------------------------------------------------------------------------------------------------------------------
# Items


class InputSound(Part, frozen=True, tag="input_audio"):
    """Sound of the user, base64 of PCM. The model hears it, and is not shown its transcript."""

    audio: bytes
    transcript: OptionalText = None


class ShownPicture(Part, frozen=True, tag="input_image"):
    """A picture for the model."""

    image_url: LongString  # as in chats
    detail: str | None = None  # ignored, as in chats

    def source(self, where: str) -> Source:
        """See `Content.source`."""
        return Source("image_url", "image", self.image_url)


class OutputSound(Part, frozen=True, tag="output_audio"):
    """A spoken answer of an earlier conversation, by its transcript: the model is shown no sound of its own."""

    transcript: BodyText
    audio: None = None


AnyContent = InputText | InputSound | ShownPicture | OutputText | OutputSound


class ItemFields(Strict, frozen=True, kw_only=True, tag_field="type"):
    """What every item of a conversation may have; `status` is without effect."""

    id: Id | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class GivenMessage(ItemFields, frozen=True, kw_only=True, tag="message"):
    """An item of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[AnyContent], Meta(min_length=1, max_length=MAX_PARTS)]


class FunctionCall(ItemFields, frozen=True, kw_only=True, tag="function_call"):
    """A call of an earlier conversation."""

    name: ToolName
    arguments: Json
    call_id: CallId | None = None


class FunctionCallOutput(ItemFields, frozen=True, kw_only=True, tag="function_call_output"):
    """What a call has brought."""

    call_id: CallId
    output: BodyText


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
    """Change the session's configuration: each of the `SessionFields` that can be changed so."""

    session: dict[str, Any]


class AppendAudio(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.append"):
    """Add sound of the user."""

    audio: bytes


class CommitAudio(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.commit"):
    """Make an item of the sound in the buffer."""


class ClearAudio(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.clear"):
    """Discard the sound in the buffer."""


class ClearOutput(ClientEvent, frozen=True, kw_only=True, tag="output_audio_buffer.clear"):
    """Discard the sound that the server has not played yet."""


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


class ResponseAudio(Fields, frozen=True, kw_only=True):
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
    | ClearOutput
    | CreateItem
    | RetrieveItem
    | DeleteItem
    | TruncateItem
    | CreateResponse
    | CancelResponse
)


def pictures_of(event: AnyEvent) -> Sequence[ShownPicture]:
    """The pictures in an event, in order; those of roles that can have none are left to `MessageItem.of`."""
    items: Sequence[GivenItem | ItemReference] = ()
    if isinstance(event, CreateItem):
        items = (event.item,)
    elif isinstance(event, CreateResponse) and event.response is not None:
        items = event.response.input or ()
    messages = [item for item in items if isinstance(item, GivenMessage) and item.role == "user"]
    return [part for message in messages for part in message.content if isinstance(part, ShownPicture)]


class _Envelope(Struct):
    """What an event that does not fit is searched for."""

    event_id: Any = None


def parse(data: bytes, kind: Any = AnyEvent, where: str = "") -> Any:
    """Decode an event, of a union of them. Raises `HttpError` 400 or 413 with the field at fault."""
    check_bounds(data, MAX_VALUES)
    return decode(data, kind, where)


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
