"""Fields of vLLM's requests that nothing here depends on: each is accepted with the values that ask for nothing."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Raw

from omni_actors.http_server.schema_fields import ABSENT, EmptyList, EmptyObject, Null, Off, One, Submission, Zero

# `decode(value, object) in [...]` compares, so 1 stands for 1.0, too.
Side = Annotated[Raw, Meta(extra_json_schema={"enum": [None, "left", "right"]})]
Tensors = Annotated[Raw, Meta(extra_json_schema={"enum": [None, "tensors"]})]
TemplateArguments = Annotated[
    Raw, Meta(extra_json_schema={"enum": [None, {}, {"enable_thinking": False}, {"add_generation_prompt": True}]})
]
NoProcessorArguments = Annotated[Raw, Meta(extra_json_schema={"enum": [None, {}, {"use_audio_in_video": False}]})]

HINTS = {
    "chat_template": "The template is the model's own.",
    "chat_template_kwargs": "The model's template takes no arguments.",
    "continue_final_message": "The answer is always a message of its own.",
    "request_id": "The response's x-request-id names the request.",
    "truncate_prompt_tokens": "A prompt that is too long is an error, never cut.",
}


class VllmFields(Submission, frozen=True, kw_only=True):
    """Those of both chat and text completions."""

    use_beam_search: Off = ABSENT
    length_penalty: One = ABSENT  # of a beam search
    truncate_prompt_tokens: Null = ABSENT
    truncation_side: Side = ABSENT  # nothing is truncated
    logprob_token_ids: EmptyList = ABSENT
    watermarking: Off = ABSENT
    thinking_token_budget: Null = ABSENT
    repetition_detection: Null = ABSENT
    stream_interval: One = ABSENT
    request_id: Null = ABSENT
    session_id: str | None = None  # ignored: requests share no state
    cache_salt: Null = ABSENT
    return_tokens_as_token_ids: Off = ABSENT
    return_token_ids: Off = ABSENT
    return_token_offsets: Off = ABSENT
    return_mm_kwargs: Off = ABSENT
    routed_experts_prompt_start: Zero = ABSENT
    mm_payload: Tensors = ABSENT  # what `return_mm_kwargs` would return
    kv_transfer_params: EmptyObject = ABSENT
    ec_transfer_params: EmptyObject = ABSENT
    vllm_xargs: EmptyObject = ABSENT
