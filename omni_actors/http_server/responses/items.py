"""The body of /v1/responses, and its items as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw

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
