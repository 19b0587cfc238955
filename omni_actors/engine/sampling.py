"""Makes vLLM's SamplingParams from StageParams; no other module does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm import envs
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.worker.gpu.sample.logit_bias import MAX_NUM_STOP_TOKEN_IDS

from omni_actors.errors import InvalidRequest
from omni_actors.protocol.payloads import (
    AUTOREGRESSIVE_PARAMS,
    MAX_PROMPT_LOGPROBS,
    TEXT_PARAMS,
    StageParams,
    StructuredOutputs,
)

# Values of the parameters that are not set: greedy, nothing cut off.
_NEUTRAL: dict[str, Any] = {
    "max_tokens": 1024,
    "min_tokens": 0,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}


def _structured_outputs(given: StructuredOutputs | None) -> StructuredOutputsParams | None:
    if given is None:
        return None
    return StructuredOutputsParams(
        json=given.json,
        json_object=given.json_object,
        regex=given.regex,
        choice=list(given.choice) if given.choice is not None else None,
        grammar=given.grammar,
        structural_tag=given.structural_tag,
        disable_any_whitespace=given.disable_any_whitespace,
        disable_additional_properties=given.disable_additional_properties,
        whitespace_pattern=given.whitespace_pattern,
    )


def make_sampling_params(
    params: StageParams,
    *,
    seed: int,
    end_token_ids: Iterable[int],
    vocabulary: int,
    payload: Any = None,
    read_prefix_cache: bool = True,
    tokenizer: TokenizerLike | None = None,
) -> SamplingParams:
    """vLLM's sampling parameters for one request.

    Args:
        params: the request's parameters; those that are `None` take a neutral value (temperature 0, no cuts).
        seed: always set, so that the same seed gives the same tokens whatever else is in the batch.
        end_token_ids: tokens at which the model ends, unless `ignore_eos`. An EngineCore does not know them itself.
        vocabulary: number of tokens; ids beyond it would be read out of bounds on the device.
        payload: passed to the worker in `extra_args["omni"]`.
        tokenizer: of a stage with text; without one, parameters about text are refused.

    Raises:
        InvalidRequest: a parameter does not apply to the stage, or values contradict one another or are too many. Its
            `field` is the parameter.
    """
    given = params.given()
    if foreign := sorted(set(given) - AUTOREGRESSIVE_PARAMS):
        raise InvalidRequest(f"Parameters {foreign} do not apply to an autoregressive stage.", field=foreign[0])
    if tokenizer is None and (textual := sorted(set(given) & TEXT_PARAMS)):
        raise InvalidRequest(f"Parameters {textual} do not apply to a stage without text.", field=textual[0])
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        if beyond := [token for token in given.get(name, ()) if token >= vocabulary]:
            raise InvalidRequest(
                f"{name}: the tokens {beyond[:8]} are outside the vocabulary of {vocabulary}.", field=name
            )
    values = {name: given.get(name, neutral) for name, neutral in _NEUTRAL.items()}
    if values["min_tokens"] > values["max_tokens"]:
        raise InvalidRequest(
            f"min_tokens {values['min_tokens']} exceeds max_tokens {values['max_tokens']}.", field="min_tokens"
        )
    if not values["max_tokens"]:
        if tokenizer is None:
            raise InvalidRequest("max_tokens 0 is for stages with text.", field="max_tokens")
        values["max_tokens"] = 1  # vLLM has no 0
    ends = () if values["ignore_eos"] else tuple(end_token_ids)
    stop_token_ids = sorted({*(params.stop_token_ids or ()), *ends})
    if values["min_tokens"] and len(stop_token_ids) > MAX_NUM_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids: with min_tokens there may be {MAX_NUM_STOP_TOKEN_IDS} of them, the model's own included; "
            f"there are {len(stop_token_ids)}.",
            field="stop_token_ids",
        )
    try:
        made = SamplingParams(
            **values,
            seed=seed,
            stop=list(params.stop or ()),
            stop_token_ids=stop_token_ids,
            logit_bias=params.logit_bias or None,
            allowed_token_ids=list(params.allowed_token_ids) if params.allowed_token_ids else None,
            bad_words=list(params.bad_words or ()),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            structured_outputs=_structured_outputs(params.structured_outputs),
            # Positions from the prefix cache have no logits.
            skip_reading_prefix_cache=not read_prefix_cache or params.prompt_logprobs is not None,
            extra_args={"omni": payload} if payload is not None else None,
        )
        if tokenizer is not None:
            made.update_from_tokenizer(tokenizer)
    except (ValueError, VLLMClientError) as error:
        raise InvalidRequest(
            f"vLLM refuses the sampling parameters: {error}", field=getattr(error, "parameter", None)
        ) from error
    # vLLM's worker would fail the whole batch.
    bad_tokens = sum(len(word) for word in made.bad_words_token_ids or ())
    if bad_tokens > envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS:
        raise InvalidRequest(
            f"bad_words: they have {bad_tokens} tokens; {envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS} are allowed.",
            field="bad_words",
        )
    return made


def check_prompt_logprobs(params: StageParams, positions: int, *, embeds: bool) -> None:
    """Raise `InvalidRequest` for log probabilities of a prompt that has none, or too many.

    Args:
        positions: the tokens of the prompt.
        embeds: whether it is given as embeddings.
    """
    if params.prompt_logprobs is None:
        return
    field = "prompt_logprobs"
    if embeds:
        raise InvalidRequest(f"{field}: a prompt of embeddings has no tokens.", hint="Leave it out.", field=field)
    if positions * (params.prompt_logprobs + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{field}: {params.prompt_logprobs} likeliest tokens and the prompt's own at {positions} positions exceed "
            f"the limit of {MAX_PROMPT_LOGPROBS} log probabilities.",
            hint="Ask for fewer, or send a shorter prompt.",
            field=field,
        )
