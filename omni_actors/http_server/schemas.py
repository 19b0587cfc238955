"""Request bodies as OpenAI defines them. An unknown or unsupported field is an error that names it.

Fields without effect here (`user`, `metadata`, ...) are accepted and ignored. Fields that would change the answer and
are not supported are refused, because ignoring them would give a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Raw, json

from omni_actors.errors import suggest
from omni_actors.http_server import vllm_fields
from omni_actors.http_server.chat_messages import AnyMessage
from omni_actors.http_server.decoding import decode
from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.generation_fields import MAX_TOKENS, GenerationFields
from omni_actors.http_server.schema_fields import (
    ABSENT,
    NULLABLE_OBJECT,
    EmptyList,
    EmptyObject,
    EmptyText,
    Metadata,
    NoTool,
    Null,
    Off,
    On,
    One,
    Strict,
    Submission,
    Switch,
    Text,
    free_form,
    is_null,
    refuse_effects,
)
from omni_actors.http_server.vllm_fields import NoProcessorArguments, TemplateArguments
from omni_actors.protocol.fields import PositiveInt, TokenId
from omni_actors.protocol.payloads import MAX_LOGPROBS, USE_AUDIO_IN_VIDEO
from omni_actors.protocol.tools import MAX_TOOLS

MAX_SPEECH_TEXT = 4096
MAX_MESSAGES = 1024

AudioFormat = Literal["wav", "pcm16", "flac", "mp3", "opus", "aac"]
Likeliest = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
SpeechFormat = Literal["mp3", "opus", "flac", "wav", "pcm", "aac"]
ONE = Meta(min_length=1, max_length=1)
Schema = Annotated[Raw, Meta(extra_json_schema={"type": NULLABLE_OBJECT})]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)]
PROMPT_FORMS = (Text, TokenIds, Annotated[list[Text], ONE], Annotated[list[TokenIds], ONE])
Prompt = Annotated[Raw, Meta(extra_json_schema={"anyOf": [json.schema(form) for form in PROMPT_FORMS]})]
AnyPrompt = Text | Annotated[list[Text | TokenId | TokenIds], Meta(max_length=MAX_TOKENS)]


class VoiceId(Strict, frozen=True):
    """A voice as an object, as OpenAI's newer clients send it."""

    id: str


class AudioParameters(Strict, frozen=True):
    """Voice and format of a spoken answer."""

    voice: str | VoiceId | None = None
    format: AudioFormat | None = None


class Function(Strict, frozen=True):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}\Z")]
    description: Text | None = None
    parameters: Schema = ABSENT
    strict: bool | None = None

    def definition(self, where: str) -> dict[str, Any]:
        """The function as models see it. Raises `HttpError` for parameters that are no object."""
        given = {"name": self.name, "description": self.description, "strict": self.strict}
        parameters = None if is_null(self.parameters) else decode(self.parameters, dict[str, Any], where)
        return {name: value for name, value in {**given, "parameters": parameters}.items() if value is not None}


class Tool(Strict, frozen=True):
    """A tool that the model may call; all are functions."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict, frozen=True):
    """The function that must be called."""

    name: str


class NamedTool(Strict, frozen=True):
    """A choice of one tool."""

    type: Literal["function"]
    function: FunctionName


def tool_options(
    tools: Sequence[Tool], choice: Literal["none", "auto", "required"] | NamedTool | None, parallel: bool | None
) -> dict[str, Any]:
    """Tools and how they may be called, as the client library takes them.

    Raises:
        HttpError: `choice` asks for what `tools` do not have.
    """
    functions = [tool.function for tool in tools]
    if not functions:
        if choice not in (None, "none", "auto"):
            raise bad_field("tool_choice", "tool_choice names a tool, but the request has no tools.")
        return {}
    chosen: Any = choice or "auto"
    if isinstance(choice, NamedTool):
        if (name := choice.function.name) not in (known := [function.name for function in functions]):
            where = "tool_choice.function.name"
            raise bad_field(where, f"{where}: there is no tool of this name.{suggest(name[:100], known)}")
        chosen = {"name": name}
    definitions = [
        function.definition(f"tools[{index}].function.parameters") for index, function in enumerate(functions)
    ]
    return {"tools": definitions, "tool_choice": chosen, "parallel_tool_calls": parallel}


class ProcessorArguments(Strict, frozen=True):
    """Arguments for the model's processor, in vLLM's form."""

    use_audio_in_video: bool | None = None


class StreamOptions(Strict, frozen=True):
    """What a streamed answer contains besides the tokens."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: nothing is obfuscated


class Sampling(GenerationFields, frozen=True, kw_only=True):
    """The fields of both chat and text completions."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Accepted, without effect.
    user: str | None = None
    metadata: Metadata = ABSENT
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: EmptyObject = ABSENT
    prompt_cache_retention: str | None = None

    IGNORED: ClassVar[tuple[str, ...]] = (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "session_id",
    )
    HINTS: ClassVar[dict[str, str]] = {
        **vllm_fields.HINTS,
        "functions": "Use tools.",
        "function_call": "Use tool_choice.",
    }

    def refuse_unsupported(self) -> None:
        """Raise `HttpError` 400 for the first field with an unsupported value."""
        refuse_effects(self, self.HINTS)
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "stream_options needs stream: true.")
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs is not supported with stream: true. Ask for the whole answer."
            raise bad_field("prompt_logprobs", message, "unsupported_parameter")
        free_form(self.metadata, dict[str, str], "metadata")

    def answers(self, slots: int) -> int:
        """How many answers are wanted. Raises `HttpError` for more than the pipeline has slots."""
        wanted = self.n or 1
        if wanted > slots:
            raise bad_field("n", f"n is {wanted}, and this pipeline has {slots} requests at a time.")
        return wanted


class ChatRequest(Sampling, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    modalities: Annotated[list[str], Meta(min_length=1, max_length=8)] | None = None
    audio: AudioParameters | None = None
    max_completion_tokens: PositiveInt | None = None

    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: EmptyList = ABSENT
    function_call: NoTool = ABSENT
    prediction: Null = ABSENT
    web_search_options: Null = ABSENT
    moderation: Null = ABSENT
    reasoning_effort: str | None = None  # ignored: the model has no separate reasoning
    verbosity: str | None = None  # ignored

    IGNORED: ClassVar[tuple[str, ...]] = (*Sampling.IGNORED, "reasoning_effort", "verbosity")

    # vLLM's
    chat_template: Null = ABSENT
    chat_template_kwargs: TemplateArguments = ABSENT
    add_generation_prompt: On = ABSENT
    continue_final_message: Off = ABSENT
    add_special_tokens: Off = ABSENT
    documents: EmptyList = ABSENT
    media_io_kwargs: EmptyObject = ABSENT
    mm_processor_kwargs: ProcessorArguments | None = None
    include_reasoning: Switch = ABSENT  # the model has no separate reasoning
    echo: Off = ABSENT
    return_prompt_text: Off = ABSENT

    def tool_options(self) -> dict[str, Any]:
        """The tools of the request and how they may be called, as the client library takes them."""
        return tool_options(self.tools or (), self.tool_choice, self.parallel_tool_calls)

    @property
    def uses_sound_of_videos(self) -> bool:
        """Whether the model hears the sound tracks of videos, too."""
        return bool(self.mm_processor_kwargs and self.mm_processor_kwargs.use_audio_in_video)

    def error_fields(self) -> dict[str, str]:
        """The request's fields at fault, by their names in the pipeline, where these differ."""
        return {**super().error_fields(), USE_AUDIO_IN_VIDEO: f"mm_processor_kwargs.{USE_AUDIO_IN_VIDEO}"}

    def likeliest(self) -> int | None:
        """OpenAI's `logprobs` switches them on, and `top_logprobs` is the number."""
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "top_logprobs needs logprobs: true.")
        return (self.top_logprobs or 0) if self.logprobs else None

    def stage_fields(self) -> dict[str, Any]:
        """Parameters for the stages; `max_completion_tokens` wins over the older `max_tokens`."""
        fields = super().stage_fields()
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        return fields


class CompletionRequest(Sampling, frozen=True, kw_only=True):
    """Body of POST /v1/completions: one prompt, as text or token ids, or a list of that one prompt."""

    prompt: Prompt
    best_of: One = ABSENT
    logprobs: Likeliest | None = None
    echo: Off = ABSENT
    suffix: EmptyText = ABSENT
    mm_processor_kwargs: NoProcessorArguments = ABSENT
    add_special_tokens: On = ABSENT
    prompt_embeds: Null = ABSENT

    def likeliest(self) -> int | None:
        """OpenAI's `logprobs` is a number here."""
        return self.logprobs

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
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None  # OpenAI's range; only 1 is possible
    instructions: Annotated[str, Meta(max_length=MAX_SPEECH_TEXT)] | None = None
    language: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


def voice_name(voice: str | VoiceId | None) -> str | None:
    """The requested voice, in either form."""
    return voice.id if isinstance(voice, VoiceId) else voice
