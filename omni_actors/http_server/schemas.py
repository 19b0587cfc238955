"""Request bodies as OpenAI defines them. An unknown or unsupported field is an error that names it.

Fields without effect here (`user`, `metadata`, ...) are accepted and ignored. Fields that would change the answer and
are not supported are refused, because ignoring them would give a wrong answer.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, Raw, Struct, field, json

from omni_actors.http_server.decoding import decode
from omni_actors.http_server.errors import bad_field
from omni_actors.protocol.fields import PositiveInt, Priority, Seed, TokenId
from omni_actors.protocol.payloads import StageParams

T = TypeVar("T")

MAX_TOKENS = 1_000_000
MAX_TEXT = 4_000_000  # characters
MAX_SPEECH_TEXT = 4096
MAX_MESSAGES = 1024
MAX_PARTS = 256
MAX_FREE_FORM = 65_536  # bytes of `stage_params` and of `metadata`
MAX_NO_EFFECT = 64  # bytes of one of the following values
NO_EFFECT: list[Any] = [
    None,
    False,
    0,
    "",
    [],
    {},
    "none",
    "auto",
    {"type": "text"},
]  # values of refused fields that are not

ABSENT: Any = field(default_factory=lambda: Raw(b"null"))  # a factory, because OpenAPI could not show the value
NULLABLE_OBJECT = ["object", "null"]
PARAMS_SCHEMA = {"$ref": "#/components/schemas/StageParams"}

AudioFormat = Literal["wav", "pcm16", "flac", "mp3", "opus"]
SpeechFormat = Literal["mp3", "opus", "flac", "wav", "pcm"]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
ONE = Meta(min_length=1, max_length=1)
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)]
PROMPT_FORMS = (Text, TokenIds, Annotated[list[Text], ONE], Annotated[list[TokenIds], ONE])
Prompt = Annotated[Raw, Meta(extra_json_schema={"anyOf": [json.schema(form) for form in PROMPT_FORMS]})]
AnyPrompt = Text | Annotated[list[Text | TokenId | TokenIds], Meta(max_length=MAX_TOKENS)]
Timeout = Annotated[float, Meta(gt=0, le=86400)]

# Decoded later, or not at all. A long string, such as base64, stays in the body until `long_strings.py` reads it.
Unsupported = Annotated[Raw, Meta(extra_json_schema={"enum": NO_EFFECT})]
LongString = Annotated[Raw, Meta(extra_json_schema={"type": "string"})]
OptionalLongString = Annotated[Raw, Meta(extra_json_schema={"type": ["string", "null"]})]
Metadata = Annotated[Raw, Meta(extra_json_schema={"type": NULLABLE_OBJECT, "additionalProperties": {"type": "string"}})]
ParamsByStage = Annotated[Raw, Meta(extra_json_schema={"type": NULLABLE_OBJECT, "additionalProperties": PARAMS_SCHEMA})]


class Strict(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A part of a body; unknown fields are errors."""


# ---------------------------------------------------------------------------------------------------------------------
# Content of messages


class Part(Strict, frozen=True, tag_field="type"):
    """A part of a message's content."""


class TextPart(Part, frozen=True, tag="text"):
    """Text in a message."""

    text: Text


class InputAudio(Strict, frozen=True):
    """A sound in the body itself."""

    data: LongString  # base64 of a file
    format: Literal["wav", "mp3", "flac", "ogg", "opus"]


class AudioPart(Part, frozen=True, tag="input_audio"):
    """A sound in a message, as OpenAI's clients send it."""

    input_audio: InputAudio


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
        return not _is_null(self.file_data)


class FilePart(Part, frozen=True, tag="file"):
    """A file in a message; its content decides what it is."""

    file: FileReference


AnyPart = TextPart | AudioPart | ImageUrlPart | AudioUrlPart | VideoUrlPart | FilePart
UserContent = Text | Annotated[list[AnyPart], Meta(max_length=MAX_PARTS)]
TextContent = Text | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]


class Message(Strict, frozen=True, tag_field="role"):
    """A message of a chat."""

    name: str | None = None  # ignored


class UserMessage(Message, frozen=True, kw_only=True, tag="user"):
    """What the user says: text, or parts with media."""

    content: UserContent


class SystemMessage(Message, frozen=True, kw_only=True, tag="system"):
    """Instructions to the model, text only."""

    content: TextContent


class DeveloperMessage(SystemMessage, frozen=True, kw_only=True, tag="developer"):
    """The same, by its newer name."""


class AudioReference(Strict, frozen=True):
    """The audio of an earlier answer, by the id that came with it."""

    id: str


class AssistantMessage(Message, frozen=True, kw_only=True, tag="assistant"):
    """An earlier answer: its text, or the id of its audio."""

    content: TextContent | None = None
    audio: AudioReference | None = None
    refusal: str | None = None


AnyMessage = UserMessage | SystemMessage | DeveloperMessage | AssistantMessage


# ---------------------------------------------------------------------------------------------------------------------
# Requests


class VoiceId(Strict, frozen=True):
    """A voice as an object, as OpenAI's newer clients send it."""

    id: str


class AudioParameters(Strict, frozen=True):
    """Voice and format of a spoken answer."""

    voice: str | VoiceId | None = None
    format: AudioFormat | None = None


class StreamOptions(Strict, frozen=True):
    """What a streamed answer contains besides the tokens."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: nothing is obfuscated


class Submission(Strict, frozen=True):
    """The fields of all requests."""

    model: str
    seed: Seed | None = None
    stage_params: ParamsByStage = ABSENT
    timeout: Timeout | None = None
    priority: Priority | None = None

    def params_by_stage(self) -> dict[str, StageParams]:
        """Decode `stage_params`. Raises `HttpError` that names the stage and the field."""
        given = _free_form(self.stage_params, dict[str, Raw], "stage_params")
        return {
            stage: decode(params, StageParams, f"stage_params.{stage[:64]}") for stage, params in (given or {}).items()
        }


class Sampling(Submission, frozen=True):
    """The fields of both chat and text completions: first OpenAI's, then vLLM's, then those that do nothing."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None

    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=256)] | None = None

    # Accepted, without effect.
    user: str | None = None
    metadata: Metadata = ABSENT
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Refused unless their value has no effect.
    stop: Unsupported = ABSENT
    frequency_penalty: Unsupported = ABSENT
    presence_penalty: Unsupported = ABSENT
    logit_bias: Unsupported = ABSENT
    logprobs: Unsupported = ABSENT
    response_format: Unsupported = ABSENT

    UNSUPPORTED: ClassVar[dict[str, str]] = {
        "stop": "Stop sequences are not supported; stage_params can name stop_token_ids.",
        "frequency_penalty": "Use repetition_penalty.",
        "presence_penalty": "Use repetition_penalty.",
        "logit_bias": "",
        "logprobs": "",
        "response_format": "Answers are free text.",
    }
    STAGE_FIELDS: ClassVar[tuple[str, ...]] = (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "min_tokens",
        "repetition_penalty",
        "ignore_eos",
        "stop_token_ids",
    )

    def refuse_unsupported(self) -> None:
        """Raise `HttpError` 400 for the first field with an unsupported value."""
        for name, hint in self.UNSUPPORTED.items():
            if _has_effect(getattr(self, name)):
                raise bad_field(name, f"{name} is not supported. {hint}".strip(), "unsupported_parameter")
        if (self.n or 1) != 1:
            raise bad_field("n", "n must be 1: one answer per request.", "unsupported_value")
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "stream_options needs stream: true.")
        _free_form(self.metadata, dict[str, str], "metadata")

    def stage_fields(self) -> dict[str, Any]:
        """The sampling fields that are set, under the names of `StageParams`."""
        return {name: value for name in self.STAGE_FIELDS if (value := getattr(self, name)) is not None}


class ChatRequest(Sampling, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    modalities: Annotated[list[str], Meta(min_length=1, max_length=8)] | None = None
    audio: AudioParameters | None = None
    max_completion_tokens: PositiveInt | None = None

    tools: Unsupported = ABSENT
    tool_choice: Unsupported = ABSENT
    functions: Unsupported = ABSENT
    function_call: Unsupported = ABSENT
    prediction: Unsupported = ABSENT
    top_logprobs: Unsupported = ABSENT
    web_search_options: Unsupported = ABSENT
    parallel_tool_calls: bool | None = None  # ignored: there are no tools
    reasoning_effort: str | None = None  # ignored: the model has no separate reasoning
    verbosity: str | None = None  # ignored

    UNSUPPORTED: ClassVar[dict[str, str]] = {
        **Sampling.UNSUPPORTED,
        **dict.fromkeys(
            ("tools", "tool_choice", "functions", "function_call", "prediction", "top_logprobs", "web_search_options"),
            "",
        ),
    }

    def stage_fields(self) -> dict[str, Any]:
        """Parameters for the stages; `max_completion_tokens` wins over the older `max_tokens`."""
        fields = super().stage_fields()
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        return fields


class CompletionRequest(Sampling, frozen=True, kw_only=True):
    """Body of POST /v1/completions: one prompt, as text or token ids, or a list of that one prompt."""

    prompt: Prompt
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None
    echo: Unsupported = ABSENT
    suffix: Unsupported = ABSENT

    UNSUPPORTED: ClassVar[dict[str, str]] = {**Sampling.UNSUPPORTED, "echo": "", "suffix": ""}

    def text_or_tokens(self) -> str | list[int]:
        """Decode `prompt`. Raises `HttpError` unless it has one of the forms."""
        prompt: Any = decode(self.prompt, AnyPrompt, "prompt")  # type: ignore[arg-type]  # a union is no class
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if not prompt:
            raise bad_field("prompt", "The prompt is empty.")
        if isinstance(prompt, str):
            return prompt
        tokens = [token for token in prompt if isinstance(token, int)]
        if len(tokens) < len(prompt):
            raise bad_field("prompt", "Each request takes one prompt: a string, or a list of token ids.")
        return tokens


class SpeechRequest(Submission, frozen=True, kw_only=True):
    """Body of POST /v1/audio/speech."""

    input: Annotated[str, Meta(min_length=1, max_length=MAX_SPEECH_TEXT)]
    voice: str | VoiceId | None = None
    response_format: SpeechFormat = "mp3"
    stream_format: Literal["audio", "sse"] | None = None
    speed: Annotated[float, Meta(ge=1, le=1)] = 1.0  # the vocoder has one speed
    instructions: Annotated[str, Meta(max_length=MAX_SPEECH_TEXT)] | None = None


def voice_name(voice: str | VoiceId | None) -> str | None:
    """The requested voice; `None` and "default" leave the choice to the pipeline."""
    name = voice.id if isinstance(voice, VoiceId) else voice
    return None if name in (None, "default") else name


def _has_effect(value: Raw) -> bool:
    """Whether a field that is refused asks for anything."""
    return len(memoryview(value)) > MAX_NO_EFFECT or decode(value, object) not in NO_EFFECT


def _free_form(value: Raw, kind: type[T], name: str) -> T | None:
    if len(memoryview(value)) > MAX_FREE_FORM:
        raise bad_field(name, f"{name} is limited to {MAX_FREE_FORM} bytes.")
    return None if _is_null(value) else decode(value, kind, name)


def _is_null(value: Raw) -> bool:
    return bytes(memoryview(value)[:5]) == b"null"
