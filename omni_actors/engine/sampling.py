"""Makes vLLM's SamplingParams from StageParams; no other module does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams

from omni_actors.errors import InvalidRequest
from omni_actors.protocol.payloads import AUTOREGRESSIVE_PARAMS, StageParams

# Values of the parameters that are not set: greedy, nothing cut off.
_NEUTRAL: dict[str, Any] = {
    "max_tokens": 1024,
    "min_tokens": 0,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def make_sampling_params(
    params: StageParams,
    *,
    seed: int,
    end_token_ids: Iterable[int],
    vocabulary: int,
    payload: Any = None,
    read_prefix_cache: bool = True,
) -> SamplingParams:
    """vLLM's sampling parameters for one request.

    Args:
        params: the request's parameters; those that are `None` take a neutral value (temperature 0, no cuts).
        seed: always set, so that the same seed gives the same tokens whatever else is in the batch.
        end_token_ids: tokens at which the model ends, unless `ignore_eos`. An EngineCore does not know them itself.
        vocabulary: number of tokens; stop tokens beyond it would be read out of bounds on the device.
        payload: passed to the worker in `extra_args["omni"]`.

    Raises:
        InvalidRequest: a parameter belongs to a diffusion stage, or values contradict one another.
    """
    given = params.given()
    if foreign := sorted(set(given) - AUTOREGRESSIVE_PARAMS):
        raise InvalidRequest(f"Parameters {foreign} do not apply to an autoregressive stage.")
    stop = tuple(params.stop_token_ids or ())
    if beyond := [token for token in stop if token >= vocabulary]:
        raise InvalidRequest(f"Stop tokens {beyond} are outside the vocabulary of {vocabulary}.")
    ends = () if params.ignore_eos else tuple(end_token_ids)
    values = {name: given.get(name, neutral) for name, neutral in _NEUTRAL.items()}
    if values["min_tokens"] > values["max_tokens"]:
        raise InvalidRequest(f"min_tokens {values['min_tokens']} exceeds max_tokens {values['max_tokens']}.")
    try:
        return SamplingParams(
            **values,
            seed=seed,
            stop_token_ids=sorted({*stop, *ends}),
            ignore_eos=bool(params.ignore_eos),
            skip_reading_prefix_cache=not read_prefix_cache,
            extra_args={"omni": payload} if payload is not None else None,
        )
    except (ValueError, VLLMClientError) as error:
        raise InvalidRequest(f"vLLM refuses the sampling parameters: {error}") from error
