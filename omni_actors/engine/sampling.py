"""StageParams -> vLLM's SamplingParams. The only place where sampling parameters of a request are made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams

from omni_actors.errors import InvalidRequest
from omni_actors.protocol.payloads import AUTOREGRESSIVE_PARAMS, StageParams


def make_sampling_params(
    params: StageParams,
    *,
    seed: int,
    end_token_ids: Iterable[int],
    vocabulary: int,
    payload: Any = None,
    read_prefix_cache: bool = True,
) -> SamplingParams:
    """vLLM parameters of one request.

    Args:
        params: must hold `max_tokens`; fields that are `None` take vLLM's neutral value (temperature 0, no cuts).
        seed: always set, so that the same seed gives the same tokens whatever else is in the batch.
        end_token_ids: tokens at which the model ends, unless `ignore_eos`. An EngineCore does not know them itself.
        vocabulary: number of tokens; stop tokens beyond it would be read out of bounds on the device.
        payload: what the worker gets of this request, in `extra_args["omni"]`.

    Raises:
        InvalidRequest: a parameter of a diffusion stage, or values that contradict one another.
    """
    given = params.given()
    if foreign := sorted(set(given) - AUTOREGRESSIVE_PARAMS):
        raise InvalidRequest(f"Parameters {foreign} do not apply to an autoregressive stage.")
    stop = tuple(params.stop_token_ids or ())
    if beyond := [token for token in stop if token >= vocabulary]:
        raise InvalidRequest(f"Stop tokens {beyond} lie outside the vocabulary of {vocabulary}.")
    ends = () if params.ignore_eos else tuple(end_token_ids)
    maximum = params.max_tokens if params.max_tokens is not None else 1024
    if (params.min_tokens or 0) > maximum:
        raise InvalidRequest(f"min_tokens {params.min_tokens} exceeds max_tokens {maximum}.")
    try:
        return SamplingParams(
            max_tokens=maximum,
            min_tokens=params.min_tokens or 0,
            temperature=params.temperature if params.temperature is not None else 0.0,
            top_p=params.top_p if params.top_p is not None else 1.0,
            top_k=params.top_k if params.top_k is not None else 0,
            min_p=params.min_p if params.min_p is not None else 0.0,
            repetition_penalty=params.repetition_penalty if params.repetition_penalty is not None else 1.0,
            seed=seed,
            stop_token_ids=sorted({*stop, *ends}),
            ignore_eos=bool(params.ignore_eos),
            skip_reading_prefix_cache=not read_prefix_cache,
            extra_args={"omni": payload} if payload is not None else None,
        )
    except (ValueError, VLLMClientError) as error:
        raise InvalidRequest(f"Sampling parameters are refused: {error}") from error
