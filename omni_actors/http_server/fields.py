"""What request bodies are made of: types of fields, and the fields of others that are accepted and ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Raw, Struct, defstruct, field, json

from omni_actors.http_server.decoding import decode
from omni_actors.http_server.errors import bad_field
from omni_actors.protocol.fields import Priority, Seed
from omni_actors.protocol.payloads import StageParams

T = TypeVar("T")
S = TypeVar("S", bound="Strict")

MAX_TEXT = 4_000_000  # characters
MAX_TOKENS = 1_000_000
MAX_FREE_FORM = 65_536  # bytes of `stage_params` and of `metadata`
MAX_IGNORED = 64  # bytes of a value that is ignored where others are refused
NULLABLE_OBJECT = ["object", "null"]

ABSENT: Any = field(default_factory=lambda: Raw(b"null"))  # a factory, because OpenAPI could not show the value

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
OptionalText = Text | None
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Timeout = Annotated[float, Meta(gt=0, le=86400)]
Modalities = Annotated[list[str], Meta(min_length=1, max_length=8)]

# A long string, such as base64, stays in the body until `media.py` reads it.
LongString = Annotated[Raw, Meta(extra_json_schema={"type": "string"})]
OptionalLongString = Annotated[Raw, Meta(extra_json_schema={"type": ["string", "null"]})]
PARAMS_SCHEMA = {"$ref": "#/components/schemas/StageParams"}
ParamsByStage = Annotated[Raw, Meta(extra_json_schema={"type": NULLABLE_OBJECT, "additionalProperties": PARAMS_SCHEMA})]
Anything = Annotated[Raw, Meta(extra_json_schema={})]  # ignored
Nothing = Annotated[list[Any], Meta(max_length=0)] | None

# ---------------------------------------------------------------------------------------------------------------------
# Fields of OpenAI's and vLLM's requests that are accepted and ignored, by name. `ANY` takes every value. The others ask
# for what is not here: null and the listed values ask for nothing, and everything else is refused.

ANY = None
Ignored = Mapping[str, tuple[Any, ...] | None]


def _only(names: str, *values: Any) -> dict[str, tuple[Any, ...] | None]:
    return dict.fromkeys(names.split(), values)


OF_OPENAI: Ignored = {
    **dict.fromkeys(("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), ANY),
    **_only("prompt_cache_options", {}),
}
OF_TEXTS: Ignored = {
    **OF_OPENAI,
    **dict.fromkeys(("user", "metadata", "store", "session_id", "truncation_side"), ANY),
    **_only("cache_salt repetition_detection request_id thinking_token_budget truncate_prompt_tokens"),
    **_only("echo return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids", False),
    **_only("use_beam_search watermarking", False),
    **_only("length_penalty stream_interval", 1),
    **_only("routed_experts_prompt_start", 0),
    **_only("mm_payload", "tensors"),
    **_only("logprob_token_ids", []),
    **_only("ec_transfer_params kv_transfer_params vllm_xargs", {}),
}
OF_CHATS: Ignored = {
    **OF_TEXTS,
    **dict.fromkeys(("include_reasoning", "reasoning_effort", "verbosity"), ANY),
    **_only("chat_template moderation prediction web_search_options"),
    **_only("add_special_tokens continue_final_message return_prompt_text", False),
    **_only("add_generation_prompt", True),
    **_only("documents functions", []),
    **_only("media_io_kwargs", {}),
    **_only("function_call", "none", "auto"),
    **_only("chat_template_kwargs", {}, {"enable_thinking": False}, {"add_generation_prompt": True}),
}
OF_COMPLETIONS: Ignored = {
    **OF_TEXTS,
    **_only("prompt_embeds"),
    **_only("add_special_tokens", True),
    **_only("best_of", 1),
    **_only("suffix", ""),
    **_only("mm_processor_kwargs", {}, {"use_audio_in_video": False}),
}
OF_RESPONSES: Ignored = {
    **OF_OPENAI,
    **_only("conversation max_tool_calls moderation prompt"),
    **_only("background", False),
    **_only("context_management", []),
    **_only("reasoning", {}),
    **_only("truncation", "disabled"),
}
OF_IMAGES: Ignored = {
    **dict.fromkeys(("user", "safety_identifier", "moderation"), ANY),
    **_only("complexity frame_count frame_duration_ms svg"),
    **_only("response_format", "b64_json"),
    **_only("quality", "auto", "standard"),
}
OF_NEW_IMAGES: Ignored = {**OF_IMAGES, **_only("style")}
OF_EDITS: Ignored = {**OF_IMAGES, **_only("mask markup input_fidelity")}
OF_TRANSCRIPTIONS: Ignored = _only("include keywords languages known_speaker_names known_speaker_references", [])

INSTEAD = {
    "chat_template": "The template is the model's own.",
    "chat_template_kwargs": "The model's template takes no arguments.",
    "continue_final_message": "The answer is always a message of its own.",
    "conversation": "Use previous_response_id, or send the items again.",
    "function_call": "Use tool_choice.",
    "functions": "Use tools.",
    "keywords": "Put them into prompt.",
    "languages": "Give one as language.",
    "mask": "Describe in the prompt what to change.",
    "quality": "Use num_inference_steps.",
    "request_id": "The response's x-request-id names the request.",
    "response_format": "Pictures come as b64_json.",
    "style": "Describe it in the prompt.",
    "truncate_prompt_tokens": "A prompt that is too long is an error, never cut.",
    "truncation": "A prompt that is too long is an error, never cut.",
}


class Strict(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A part of a body; unknown fields are errors."""


def ignoring(kind: type[S], ignored: Ignored) -> type[S]:
    """Derive a struct that has the ignored fields beside its own."""
    fields = []
    for name, values in ignored.items():
        # The order keeps Python from taking one of two equal types, such as those of [null, 0] and [null, false].
        schema: dict[str, Any] = {} if values is ANY else {"enum": [*values, None]}
        fields.append((name, Annotated[Raw, Meta(extra_json_schema=schema)], ABSENT))
    options: dict[str, Any] = {"frozen": True, "kw_only": True, "module": kind.__module__}
    derived = defstruct(kind.__name__, fields, bases=(kind,), namespace={"__doc__": kind.__doc__}, **options)
    return derived  # type: ignore[return-value]  # which says nothing of the bases


def refuse_effects(body: Strict, ignored: Ignored) -> None:
    """Raise `HttpError` 400 for the first field that asks for what is not here."""
    for name, values in ignored.items():
        value: Raw = getattr(body, name)
        if values is ANY or is_null(value):
            continue
        if len(memoryview(value)) <= MAX_IGNORED and decode(value, object) in values:
            continue
        only = " or ".join(json.encode(each).decode() for each in values)
        hint = INSTEAD.get(name) or (f"Leave it out, or give {only}." if only else "Leave it out.")
        raise bad_field(name, f"{name} is not supported. {hint}", "unsupported_parameter")


# ---------------------------------------------------------------------------------------------------------------------
# Fields of all requests


class Submission(Strict, frozen=True, kw_only=True):
    """The fields of all requests that reach the pipeline."""

    model: str | None = None  # the first of those that are served
    seed: Seed | None = None
    timeout: Timeout | None = None
    priority: Priority | None = None


class StagedSubmission(Submission, frozen=True, kw_only=True):
    """The same with parameters by stage."""

    stage_params: ParamsByStage = ABSENT

    def params_by_stage(self) -> dict[str, StageParams]:
        """Decode `stage_params`. Raises `HttpError` that names the stage and the field."""
        return decoded_params(self.stage_params)


def decoded_params(stage_params: Raw) -> dict[str, StageParams]:
    """Parameters by stage. Raises `HttpError` that names the stage and the field."""
    found = {}
    for stage, params in (free_form(stage_params, dict[str, Raw], "stage_params") or {}).items():
        where = f"stage_params.{stage[:64]}"
        found[stage] = decode(params, StageParams, where)
        if found[stage].prompt_logprobs is not None:  # most answers have no place for them
            param = f"{where}.prompt_logprobs"
            message = f"{param} is not supported. Give prompt_logprobs as a field of a chat or a text completion."
            raise bad_field(param, message, "unsupported_parameter")
    return found


def free_form(value: Raw, kind: type[T], name: str) -> T | None:
    """Decode a field of any form, such as `metadata`. Raises `HttpError` if it does not fit or is long."""
    if len(memoryview(value)) > MAX_FREE_FORM:
        raise bad_field(name, f"{name} is limited to {MAX_FREE_FORM} bytes.")
    return None if is_null(value) else decode(value, kind, name)


def is_null(value: Raw) -> bool:
    """Whether a field is null, or absent."""
    return bytes(memoryview(value)[:5]) == b"null"
