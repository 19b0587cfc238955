"""What chats, completions and responses have in common: messages, and how the text is generated."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from msgspec import Meta, Raw, Struct, json

from omni_actors.client import MAX_CHOICES
from omni_actors.client.prompts import with_json_text
from omni_actors.errors import suggest
from omni_actors.http_server.bodies import (
    ABSENT,
    MAX_FREE_FORM,
    NULLABLE_OBJECT,
    Anything,
    BodyText,
    LongString,
    OptionalLongString,
    OptionalText,
    StagedSubmission,
    Strict,
    Temperature,
    decode,
    free_form,
    is_null,
)
from omni_actors.http_server.errors import bad_field
from omni_actors.protocol.fields import PositiveInt
from omni_actors.protocol.payloads import (
    AUTOREGRESSIVE_PARAMS,
    MAX_CALLS,
    MAX_LOGPROBS,
    MAX_TOOLS,
    CallId,
    Json,
    StructuredOutputs,
    ToolName,
    Word,
    Words,
)

MAX_MESSAGES = 1024
MAX_PARTS = 256


class Source(NamedTuple):
    """Where a medium of a request is.

    Args:
        param: the field that has it.
        modality: "" for a file, whose content decides what it is.
        data: JSON string, a URL unless `is_base64`; not of an uploaded file, which has a `file_id`.
        name: of the file.
    """

    param: str
    modality: str = ""
    data: Raw = Raw(b"null")
    is_base64: bool = False
    file_id: str | None = None
    name: str | None = None


class Content(Protocol):
    """A part of a message in any route."""

    def source(self, where: str) -> Source | str:
        """Its medium, or its text; `where` is the field of the part. Raises `HttpError` 400 if it lacks something."""


class Part(Strict, frozen=True, tag_field="type"):
    """A part of a message's content."""


class SomeText(Part, frozen=True):
    """A part that is a text."""

    text: BodyText

    def source(self, where: str) -> str:
        """See `Content.source`."""
        return self.text


class TextPart(SomeText, frozen=True, tag="text"):
    """Text in a message."""


class InputText(SomeText, frozen=True, tag="input_text"):
    """Text for the model, in a response or a realtime session."""


class OutputText(SomeText, frozen=True, tag="output_text"):
    """Text of the model, as it came, in a response or a realtime session."""

    annotations: Anything = ABSENT  # ignored, as is the next one
    logprobs: Anything = ABSENT


class AudioData(Strict, frozen=True):
    """A sound in the body itself."""

    data: LongString  # base64 of a file
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "mp4", "webm"]


class AudioPart(Part, frozen=True, tag="input_audio"):
    """A sound in a message, as OpenAI's clients send it."""

    input_audio: AudioData

    def source(self, where: str) -> Source:
        """See `Content.source`."""
        return Source(f"{where}.input_audio.data", "audio", self.input_audio.data, is_base64=True)


class Url(Strict, frozen=True):
    """Where a medium lies."""

    url: LongString  # data: URI, or https: of an allowed host
    detail: str | None = None  # of OpenAI's images; ignored


class UrlPart(Part, frozen=True):
    """A medium by URL, in the field that has the name of its type."""

    def source(self, where: str) -> Source:
        """See `Content.source`."""
        name = str(self.__struct_config__.tag)
        return Source(f"{where}.{name}.url", name.removesuffix("_url"), getattr(self, name).url)


class ImageUrlPart(UrlPart, frozen=True, tag="image_url"):
    """A picture in a message."""

    image_url: Url


class AudioUrlPart(UrlPart, frozen=True, tag="audio_url"):
    """A sound in a message, by URL."""

    audio_url: Url


class VideoUrlPart(UrlPart, frozen=True, tag="video_url"):
    """A video in a message."""

    video_url: Url


class FileReference(Strict, frozen=True):
    """A file that was uploaded before (`file_id`) or is in the body itself (`file_data`)."""

    file_id: str | None = None
    file_data: OptionalLongString = ABSENT  # data: URI
    filename: str | None = None

    def source(self, where: str) -> Source:
        """See `Content.source`."""
        if (self.file_id is None) == is_null(self.file_data):
            raise bad_field(where, "Give exactly one of file_id and file_data.")
        param = f"{where}.{'file_data' if self.file_id is None else 'file_id'}"
        return Source(param, data=self.file_data, file_id=self.file_id, name=self.filename)


class FilePart(Part, frozen=True, tag="file"):
    """A file in a message; its content decides what it is."""

    file: FileReference

    def source(self, where: str) -> Source:
        """See `Content.source`."""
        return self.file.source(f"{where}.file")


AnyPart = TextPart | AudioPart | ImageUrlPart | AudioUrlPart | VideoUrlPart | FilePart
UserContent = BodyText | Annotated[list[AnyPart], Meta(max_length=MAX_PARTS)]
TextContent = BodyText | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]


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


class Turn(Struct):
    """A message of any route whose media are not read yet.

    Args:
        calls: of tools, as the client library takes them.
        answers: the id of the call whose result it is, and the field that has it.
    """

    role: str
    content: str | Sequence[Content]
    calls: list[dict[str, str]] = []
    answers: tuple[str, str] | None = None


Turns = Mapping[str, Turn]  # by their fields of the request


def called_tool(call_id: str, name: str, arguments: str) -> dict[str, str]:
    """A call as the client library takes it."""
    return {"id": call_id, "name": name, "arguments": arguments}


AudioFormat = Literal["wav", "pcm16", "flac", "mp3", "opus", "aac"]
Speed = Annotated[float, Meta(ge=0.25, le=4)]  # OpenAI's range for speech
Likeliest = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class VoiceId(Strict, frozen=True):
    """A voice as an object, as OpenAI's newer clients send it."""

    id: str


class AudioParameters(Strict, frozen=True):
    """Voice, format and speed of a spoken answer."""

    voice: str | VoiceId | None = None
    format: AudioFormat | None = None
    speed: Speed | None = None  # not OpenAI's


def voice_name(
    given: str | VoiceId | None, voices: Collection[str], aliases: Mapping[str, str], where: str
) -> str | None:
    """The pipeline's name of a requested voice, `None` for its default.

    A name that is neither a voice nor an alias is left to the pipeline, which knows what to say.

    Raises:
        HttpError: 400 for an alias of a voice that the pipeline does not have.
    """
    name = given.id if isinstance(given, VoiceId) else given
    known = {*voices, "default"}
    alias_of = aliases.get(name) if name is not None and name not in known else None
    if alias_of is not None and alias_of not in known:
        message = f"{name!r} is an alias of {alias_of!r} in http.voice_aliases, which this pipeline does not have. "
        message += f"The voices are {', '.join(voices) or 'none'}."
        raise bad_field(where, message, "unknown_voice")
    found = alias_of or name
    return None if found == "default" else found


# ---------------------------------------------------------------------------------------------------------------------
# Tools

ToolMode = Literal["none", "auto", "required"]


class Function(Strict, frozen=True):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}\Z")]
    description: BodyText | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def definition(self) -> dict[str, Any]:
        """The function as models see it."""
        names = ("name", "description", "strict", "parameters")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Tool(Strict, frozen=True):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function


class FlatTool(Function, frozen=True, kw_only=True):
    """A tool of a response or of a realtime session."""

    type: Literal["function"]


class FunctionName(Strict, frozen=True):
    """The function that must be called."""

    name: str


class NamedTool(Strict, frozen=True):
    """A choice of one tool in a chat."""

    type: Literal["function"]
    function: FunctionName


class FlatChoice(FunctionName, frozen=True, kw_only=True):
    """A choice of one tool in a response or in a realtime session."""

    type: Literal["function"]


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
FlatTools = Annotated[list[FlatTool], Meta(max_length=MAX_TOOLS)]


def tool_options(
    functions: Sequence[Function], choice: ToolMode | FunctionName | None, parallel: bool | None, where: str
) -> dict[str, Any]:
    """Tools and how they may be called, as the client library takes them.

    Args:
        where: the field of the request that holds `choice`.

    Raises:
        HttpError: `choice` asks for what `functions` do not have.
    """
    known = [function.name for function in functions]
    if isinstance(choice, FunctionName) and choice.name not in known:
        message = f"{where}.name: there is no tool of this name.{suggest(choice.name[:100], known)}"
        raise bad_field(f"{where}.name", message)
    if choice == "required" and not functions:
        raise bad_field(where.removesuffix(".function"), "tool_choice requires a tool, and there are none.")
    if not functions:
        return {}
    return {
        "tools": [function.definition() for function in functions],
        "tool_choice": {"name": choice.name} if isinstance(choice, FunctionName) else choice or "auto",
        "parallel_tool_calls": parallel,
    }


# ---------------------------------------------------------------------------------------------------------------------
# The form of the text

SchemaName = Annotated[str, Meta(min_length=1, max_length=64)]
AnyObject = Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
OptionalObject = Annotated[Raw, Meta(extra_json_schema={"type": NULLABLE_OBJECT})]
OptionalList = Annotated[Raw, Meta(extra_json_schema={"type": ["array", "null"]})]
FORM_SCHEMA = {"anyOf": [{"$ref": "#/components/schemas/StructuredOutputs"}, {"type": "null"}]}
StructuredFields = Annotated[Raw, Meta(extra_json_schema=FORM_SCHEMA)]


class ResponseFormat(Strict, frozen=True, tag_field="type"):
    """A form by its type."""


class TextFormat(ResponseFormat, frozen=True, tag="text"):
    """Free text."""


class JsonObjectFormat(ResponseFormat, frozen=True, tag="json_object"):
    """Any JSON object."""


class JsonSchema(Strict, frozen=True):
    """A schema with its name."""

    name: SchemaName
    schema: AnyObject
    description: str | None = None  # ignored: the model does not see the schema
    strict: bool | None = None  # ignored: the schema always holds


class JsonSchemaFormat(ResponseFormat, frozen=True, tag="json_schema"):
    """JSON that fits a schema."""

    json_schema: JsonSchema


class StructuralTagFormat(ResponseFormat, frozen=True, tag="structural_tag"):
    """Free text with tags between which schemas hold, as in vLLM."""

    format: OptionalObject = ABSENT
    structures: OptionalList = ABSENT
    triggers: OptionalList = ABSENT


class FlatSchemaFormat(ResponseFormat, frozen=True, omit_defaults=True, tag="json_schema"):
    """JSON that fits a schema, as `/v1/responses` has it."""

    name: SchemaName
    schema: AnyObject
    description: str | None = None  # ignored, as is the next one
    strict: bool | None = None


FlatFormat = TextFormat | JsonObjectFormat | FlatSchemaFormat
AnyResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


def output_form(given: AnyResponseFormat | FlatFormat | None) -> StructuredOutputs | None:
    """The form that a request asks for. Raises `HttpError` for a schema that is none."""
    match given:
        case JsonObjectFormat():
            return StructuredOutputs(json_object=True)
        case FlatSchemaFormat():
            return StructuredOutputs(json=_object(given.schema, "text.format.schema"))
        case JsonSchemaFormat():
            return StructuredOutputs(json=_object(given.json_schema.schema, "response_format.json_schema.schema"))
        case StructuralTagFormat():
            parts = {
                name: part for name in ("format", "structures", "triggers") if not is_null(part := getattr(given, name))
            }
            tag = Raw(json.encode({"type": "structural_tag", **parts}))
            return StructuredOutputs(structural_tag=_object(tag, "response_format"))
        case TextFormat() | None:
            return None


def _object(value: Raw, name: str) -> str:
    if len(memoryview(value)) > MAX_FREE_FORM:
        raise bad_field(name, f"{name} is limited to {MAX_FREE_FORM} bytes.")
    decode(value, dict[str, Any], name)
    return bytes(value).decode()


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


def answers_of(n: int | None, slots: int) -> int:
    """How many answers are wanted. Raises `HttpError` for more than the pipeline has slots."""
    if (n or 1) > slots:
        raise bad_field("n", f"n is {n}, and this pipeline has {slots} requests at a time.")
    return n or 1


class StreamOptions(Strict, frozen=True):
    """What a streamed answer contains besides the tokens."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: nothing is obfuscated


# Of a stage that writes text, and fields of the same names. Further ones are fields with other limits or forms.
OTHERS = ["seed", "adapter", "logprobs", "max_tokens", "temperature", "stop", "structured_outputs", "prompt_logprobs"]
PARAMETERS = sorted(AUTOREGRESSIVE_PARAMS - {*OTHERS})


class Sampling(StagedSubmission, frozen=True, kw_only=True):
    """The fields of both chat and text completions besides `PARAMETERS`.

    Most become the parameter of the text stage that has their name.
    """

    max_tokens: PositiveInt | None = None
    temperature: Temperature | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: Word | Words | None = None
    response_format: AnyResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredFields = ABSENT  # vLLM's, as is the next one
    prompt_logprobs: Likeliest | None = None

    def check(self) -> None:
        """Raise `HttpError` 400 for fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "stream_options needs stream: true.")
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs is not supported with stream: true. Ask for the whole answer."
            raise bad_field("prompt_logprobs", message, "unsupported_parameter")

    def stage_fields(self) -> dict[str, Any]:
        """The fields that are set, under the names of `StageParams`; not `seed`, which goes to all stages."""
        given = {name: getattr(self, name, None) for name in AUTOREGRESSIVE_PARAMS - {"seed"}}
        given["logprobs"] = self.likeliest()
        given["structured_outputs"] = self._form()
        if isinstance(self.stop, str):
            given["stop"] = (self.stop,)
        return {name: value for name, value in given.items() if value is not None}

    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to report at each position; `None` for no log probabilities."""
        return None

    def _form(self) -> StructuredOutputs | None:
        given = free_form(self.structured_outputs, dict[str, Any], "structured_outputs")
        form = output_form(self.response_format)
        if given is None:
            return form
        if form is not None:
            raise bad_field("structured_outputs", "structured_outputs and response_format exclude one another.")
        return decode(json.encode(with_json_text(given)), StructuredOutputs, "structured_outputs")

    def error_fields(self) -> dict[str, str]:
        """The request's fields at fault, by their names in the pipeline, where these differ."""
        if self.response_format is None:
            return {}
        schema = "response_format.json_schema.schema"
        return {"structured_outputs.json": schema, "structured_outputs.structural_tag": "response_format"}


# ---------------------------------------------------------------------------------------------------------------------
# What is known of a recording

MAX_PROMPT = 16_384  # characters

Language = Annotated[str, Meta(pattern="^[A-Za-z][A-Za-z-]{1,34}$")]
TranscriptionPrompt = Annotated[str, Meta(max_length=MAX_PROMPT)]
