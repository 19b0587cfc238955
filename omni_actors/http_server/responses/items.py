"""The body of /v1/responses, and its items as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Raw

from omni_actors.http_server import generation as chat
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
)
from omni_actors.http_server.errors import bad_field
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
    ToolMode,
    output_form,
    tool_options,
)
from omni_actors.protocol.fields import PositiveInt
from omni_actors.protocol.payloads import CallId, Json, ToolName

Metadata = Annotated[Raw, Meta(extra_json_schema={"type": NULLABLE_OBJECT, "additionalProperties": {"type": "string"}})]
LOGPROBS = "message.output_text.logprobs"
Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]  # the second one without effect


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
