"""Request bodies as OpenAI defines them. An unknown or unsupported field is an error that names it.

Fields without effect here (`user`, `metadata`, ...) are accepted and ignored. Fields that would change the answer and
are not supported are refused, because ignoring them would give a wrong answer.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from omni_actors.http_server.errors import HttpError

MAX_TOKENS = 1_000_000
MAX_SEED = 2**63 - 1
MAX_TEXT = 4_000_000  # characters
MAX_SPEECH_TEXT = 4096
MAX_MESSAGES = 1024
MAX_PARTS = 256

AudioFormat = Literal["wav", "pcm16", "flac", "mp3", "opus"]
SpeechFormat = Literal["mp3", "opus", "flac", "wav", "pcm"]
Text = Annotated[str, Field(max_length=MAX_TEXT)]


class Strict(BaseModel):
    """A part of a body; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


# ---------------------------------------------------------------------------------------------------------------------
# Content of messages


class TextPart(Strict):
    """Text in a message."""

    type: Literal["text"]
    text: Text


class InputAudio(Strict):
    """A sound in the body itself."""

    data: str  # base64 of a file
    format: Literal["wav", "mp3", "flac", "ogg", "opus"]


class AudioPart(Strict):
    """A sound in a message, as OpenAI's clients send it."""

    type: Literal["input_audio"]
    input_audio: InputAudio


class Url(Strict):
    """Where a medium lies."""

    url: str  # data: URI, or https: of an allowed host
    detail: str | None = None  # of OpenAI's images; ignored


class ImageUrlPart(Strict):
    """A picture in a message."""

    type: Literal["image_url"]
    image_url: Url


class AudioUrlPart(Strict):
    """A sound in a message, by URL."""

    type: Literal["audio_url"]
    audio_url: Url


class VideoUrlPart(Strict):
    """A video in a message."""

    type: Literal["video_url"]
    video_url: Url


class FileReference(Strict):
    """A file that was uploaded before (`file_id`) or is in the body itself (`file_data`)."""

    file_id: str | None = None
    file_data: str | None = None  # data: URI
    filename: str | None = None


class FilePart(Strict):
    """A file in a message; its content decides what it is."""

    type: Literal["file"]
    file: FileReference


Part = Annotated[
    TextPart | AudioPart | ImageUrlPart | AudioUrlPart | VideoUrlPart | FilePart, Field(discriminator="type")
]
UserContent = Annotated[str, Field(max_length=MAX_TEXT)] | Annotated[list[Part], Field(max_length=MAX_PARTS)]
TextContent = Annotated[str, Field(max_length=MAX_TEXT)] | Annotated[list[TextPart], Field(max_length=MAX_PARTS)]


class UserMessage(Strict):
    """What the user says: text, or parts with media."""

    role: Literal["user"]
    content: UserContent
    name: str | None = None


class SystemMessage(Strict):
    """Instructions to the model, text only."""

    role: Literal["system", "developer"]
    content: TextContent
    name: str | None = None


class AudioReference(Strict):
    """The audio of an earlier answer, by the id that came with it."""

    id: str


class AssistantMessage(Strict):
    """An earlier answer: its text, or the id of its audio."""

    role: Literal["assistant"]
    content: TextContent | None = None
    audio: AudioReference | None = None
    name: str | None = None
    refusal: str | None = None


Message = Annotated[UserMessage | SystemMessage | AssistantMessage, Field(discriminator="role")]


# ---------------------------------------------------------------------------------------------------------------------
# Requests


class VoiceId(Strict):
    """A voice as an object, as OpenAI's newer clients send it."""

    id: str


class AudioParameters(Strict):
    """Voice and format of a spoken answer."""

    voice: str | VoiceId | None = None
    format: AudioFormat | None = None


class StreamOptions(Strict):
    """What a streamed answer contains besides the tokens."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: nothing is obfuscated


class Sampling(Strict):
    """The fields of both chat and text completions: first OpenAI's, then vLLM's, then our own."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None

    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=256)] | None = None

    stage_params: dict[str, dict[str, Any]] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None

    # Accepted, without effect.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Refused unless their value has no effect.
    stop: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    response_format: Any = None

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
            value = getattr(self, name)
            if value and value not in ({"type": "text"}, "none", "auto"):
                raise HttpError(
                    400, f"{name} is not supported. {hint}".strip(), param=name, code="unsupported_parameter"
                )
        if (self.n or 1) != 1:
            raise HttpError(400, "n must be 1: one answer per request.", param="n", code="unsupported_value")
        if self.stream_options is not None and not self.stream:
            raise HttpError(400, "stream_options needs stream: true.", param="stream_options", code="invalid_value")

    def stage_fields(self) -> dict[str, Any]:
        """The sampling fields that are set, under the names of `StageParams`."""
        return {name: value for name in self.STAGE_FIELDS if (value := getattr(self, name)) is not None}


class ChatRequest(Sampling):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    modalities: Annotated[list[str], Field(min_length=1, max_length=8)] | None = None
    audio: AudioParameters | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    prediction: Any = None
    top_logprobs: Any = None
    web_search_options: Any = None
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


class CompletionRequest(Sampling):
    """Body of POST /v1/completions: one prompt, as text or token ids."""

    prompt: (
        Annotated[str, Field(max_length=MAX_TEXT)]
        | Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_TOKENS)]
        | Annotated[list[str], Field(max_length=1)]
        | Annotated[list[list[Annotated[int, Field(ge=0, lt=2**31)]]], Field(max_length=1)]
    )
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    echo: Any = None
    suffix: Any = None

    UNSUPPORTED: ClassVar[dict[str, str]] = {**Sampling.UNSUPPORTED, "echo": "", "suffix": ""}


class SpeechRequest(Strict):
    """Body of POST /v1/audio/speech."""

    model: str
    input: Annotated[str, Field(min_length=1, max_length=MAX_SPEECH_TEXT)]
    voice: str | VoiceId | None = None
    response_format: SpeechFormat = "mp3"
    stream_format: Literal["audio", "sse"] = "audio"
    speed: Annotated[float, Field(ge=1, le=1)] = 1.0  # the vocoder has one speed
    instructions: Annotated[str, Field(max_length=MAX_SPEECH_TEXT)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stage_params: dict[str, dict[str, Any]] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None


def voice_name(voice: str | VoiceId | None) -> str | None:
    """The requested voice; `None` and "default" leave the choice to the pipeline."""
    name = voice.id if isinstance(voice, VoiceId) else voice
    return None if name in (None, "default") else name
