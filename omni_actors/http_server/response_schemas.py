"""The body of /v1/responses as OpenAI defines it, and its input as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from msgspec import Meta, Raw

from omni_actors.http_server import chat_messages as chat
from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.output_formats import FlatFormat, flat_form
from omni_actors.http_server.schema_fields import (
    ABSENT,
    EmptyList,
    EmptyObject,
    Metadata,
    Null,
    Off,
    OptionalLongString,
    Strict,
    Submission,
    Text,
    free_form,
    is_null,
    refuse_effects,
)
from omni_actors.http_server.schemas import (
    MAX_MESSAGES,
    AudioParameters,
    Function,
    FunctionName,
    Likeliest,
    NamedTool,
    Tool,
    tool_options,
)
from omni_actors.protocol.fields import PositiveInt
from omni_actors.protocol.tools import MAX_TOOLS, CallId, Json, ToolName

Truncation = Annotated[Raw, Meta(extra_json_schema={"enum": [None, "disabled"]})]  # nothing is ever cut
LOGPROBS = "message.output_text.logprobs"
Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]  # the second one without effect


# ---------------------------------------------------------------------------------------------------------------------
# Input


class InputPart(Strict, frozen=True, tag_field="type"):
    """A part of an item's content."""


class InputText(InputPart, frozen=True, tag="input_text"):
    """What is said to the model."""

    text: Text


class OutputText(InputPart, frozen=True, tag="output_text"):
    """What the model said, as it came."""

    text: Text
    annotations: EmptyList = ABSENT
    logprobs: EmptyList = ABSENT


class Refusal(InputPart, frozen=True, tag="refusal"):
    """A refusal of the model."""

    refusal: Text


class InputImage(InputPart, frozen=True, tag="input_image"):
    """A picture, by URL or as an uploaded file."""

    image_url: OptionalLongString = ABSENT
    file_id: str | None = None
    detail: str | None = None  # ignored, as in chats


class InputAudioPart(InputPart, frozen=True, tag="input_audio"):
    """A sound."""

    input_audio: chat.InputAudio


class InputFile(InputPart, frozen=True, tag="input_file"):
    """A file, uploaded before or in the body."""

    file_id: str | None = None
    file_data: OptionalLongString = ABSENT
    filename: str | None = None


AnyInput = InputText | OutputText | Refusal | InputImage | InputAudioPart | InputFile
Content = Text | Annotated[list[AnyInput], Meta(max_length=chat.MAX_PARTS)]


class SpokenAnswer(Strict, frozen=True):
    """The sound of an answer, as it came; the model is given the text."""

    data: OptionalLongString = ABSENT
    transcript: Text | None = None


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


class FlatTool(Strict, frozen=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}\Z")]
    description: Text | None = None
    parameters: Annotated[Raw, Meta(extra_json_schema={"type": ["object", "null"]})] = ABSENT
    strict: bool | None = None


class FlatChoice(Strict, frozen=True):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class TextOptions(Strict, frozen=True):
    """The form of the text; `verbosity` is ignored."""

    format: FlatFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(Strict, frozen=True):
    """Accepted, without effect: nothing is obfuscated."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Submission, frozen=True, kw_only=True):
    """Body of POST /v1/responses. `modalities` and `audio` are those of chats."""

    input: Text | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[str], Meta(min_length=1, max_length=8)] | None = None
    audio: AudioParameters | None = None
    text: TextOptions | None = None
    include: Annotated[list[Include], Meta(max_length=8)] | None = None
    top_logprobs: Likeliest | None = None
    metadata: Metadata = ABSENT
    user: str | None = None  # ignored, as are the next four
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # Refused unless their value has no effect.
    background: Off = ABSENT
    context_management: EmptyList = ABSENT
    conversation: Null = ABSENT
    max_tool_calls: Null = ABSENT
    moderation: Null = ABSENT
    prompt: Null = ABSENT
    prompt_cache_options: EmptyObject = ABSENT
    reasoning: EmptyObject = ABSENT
    truncation: Truncation = ABSENT

    HINTS: ClassVar[dict[str, str]] = {
        "conversation": "Use previous_response_id, or send the items again.",
        "truncation": "A prompt that is too long is an error, never cut.",
    }

    def refuse_unsupported(self) -> None:
        """Raise `HttpError` 400 for the first field with an unsupported value."""
        refuse_effects(self, self.HINTS)
        free_form(self.metadata, dict[str, str], "metadata")

    def stage_fields(self) -> dict[str, Any]:
        """The sampling fields that are set, under the names of `StageParams`."""
        fields: dict[str, Any] = {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": self._likeliest(),
            "structured_outputs": flat_form(self.text.format) if self.text is not None else None,
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
        tools = [
            Tool("function", Function(tool.name, tool.description, tool.parameters, tool.strict))
            for tool in self.tools or ()
        ]
        choice = self.tool_choice
        named = NamedTool("function", FunctionName(choice.name)) if isinstance(choice, FlatChoice) else choice
        return tool_options(tools, named, self.parallel_tool_calls)


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
    if isinstance(part, InputAudioPart):
        return chat.AudioPart(part.input_audio)
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
        if isinstance(part, InputAudioPart | InputFile | InputImage):
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
