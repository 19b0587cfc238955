"""How tokens are chosen: sampling parameters, and grammars of structured outputs, compiled outside the loop.

What a grammar takes of the engine's steps afterwards is limited, because the requests of a step wait for one another.
Other work that a request needs before vLLM can have it, such as encoding a clip, is done by the same thread.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import msgspec
import torch
from msgspec import Struct
from vllm import envs
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import TokenizerLike, cached_tokenizer_from_config
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.worker.gpu.sample.logit_bias import MAX_NUM_STOP_TOKEN_IDS

from omni_actors.errors import EngineError, InvalidRequest, OmniError
from omni_actors.protocol.payloads import (
    AUTOREGRESSIVE_PARAMS,
    MAX_PROMPT_LOGPROBS,
    STRUCTURES,
    TEXT_PARAMS,
    StageParams,
)

# Values of the parameters that are not set, where they are not those of vLLM.
_NEUTRAL: dict[str, Any] = {"max_tokens": 1024, "min_tokens": 0, "temperature": 0.0, "ignore_eos": False}


def _given(params: Struct) -> dict[str, Any]:
    """The fields that are set, with lists in the place of tuples and mappings in that of structs, as vLLM has them."""
    fields = {name: value for name, value in msgspec.structs.asdict(params).items() if value is not None}
    return {
        name: list(value) if isinstance(value, tuple) else _given(value) if isinstance(value, Struct) else value
        for name, value in fields.items()
    }


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
        params: the request's parameters, by vLLM's names; those that are `None` take a neutral value (temperature 0, no
            cuts).
        seed: always set, so that the same seed gives the same tokens whatever else is in the batch.
        end_token_ids: tokens at which the model ends, unless `ignore_eos`. An EngineCore does not know them itself.
        vocabulary: number of tokens; ids beyond it would be read out of bounds on the device.
        payload: passed to the worker in `extra_args["omni"]`.
        tokenizer: of a stage with text; without one, parameters about text are refused.

    Raises:
        InvalidRequest: a parameter does not apply to the stage, or values contradict one another or are too many. Its
            `field` is the parameter.
    """
    given = _given(params)
    if foreign := sorted(set(given) - AUTOREGRESSIVE_PARAMS):
        raise InvalidRequest(f"Parameters {foreign} do not apply to an autoregressive stage.", field=foreign[0])
    if tokenizer is None and (textual := sorted(set(given) & TEXT_PARAMS)):
        raise InvalidRequest(f"Parameters {textual} do not apply to a stage without text.", field=textual[0])
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        if beyond := [token for token in given.get(name, ()) if token >= vocabulary]:
            raise InvalidRequest(
                f"{name}: the tokens {beyond[:8]} are outside the vocabulary of {vocabulary}.", field=name
            )
    values = {**_NEUTRAL, **given}
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
    values.pop("adapter", None)
    form = values.pop("structured_outputs", None)
    values |= {"seed": seed, "stop_token_ids": stop_token_ids, "logit_bias": params.logit_bias or None}
    try:
        made = SamplingParams(
            **values,
            structured_outputs=StructuredOutputsParams(**form) if form is not None else None,
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


LOWEST_PRIORITY = 19
# Processor time of one answer's grammar. A usual one takes 0.1 ms of a token, with a large vocabulary up to 1 ms.
GRAMMAR_SECONDS, TOKEN_SECONDS = 0.5, 0.005
T = TypeVar("T")
Prepared = tuple[Request, int]  # what vLLM's core makes of a request before it adds it


class Compilation(Struct, frozen=True, eq=False):
    """A request whose grammar is compiled, or could not be: `error` says why."""

    request: EngineCoreRequest
    prepared: Prepared | None = None
    error: OmniError | None = None


class TimedGrammar:
    """The grammar of one request, and the processor time that it has taken of the engine's steps."""

    def __init__(self, grammar: StructuredOutputGrammar, form: str) -> None:
        self._grammar, self._form = grammar, form
        self._seconds, self._tokens = 0.0, 0

    def check(self) -> None:
        """Raise `InvalidRequest` if it takes so long that others would wait for it."""
        if self._seconds > GRAMMAR_SECONDS + TOKEN_SECONDS * self._tokens:
            raise InvalidRequest(
                f"structured_outputs.{self._form} takes too long: {self._seconds:.2f} s for {self._tokens} tokens.",
                hint="Write it so that there are fewer ways to read the same text.",
                field=f"structured_outputs.{self._form}",
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance by tokens, as vLLM asks."""
        self._tokens += len(tokens)
        return self._timed(self._grammar.accept_tokens, request_id, tokens)

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        """Mark the tokens that may come next, as vLLM asks."""
        self._timed(self._grammar.fill_bitmask, bitmask, index)

    def _timed(self, work: Callable[..., T], *arguments: Any) -> T:
        began = time.thread_time()
        done = work(*arguments)
        self._seconds += time.thread_time() - began
        return done


def needs_grammar(request: EngineCoreRequest) -> bool:
    """Whether a request asks for structured output."""
    return request.sampling_params is not None and request.sampling_params.structured_outputs is not None


class GrammarCompiler:
    """Checks requests with structured output and has vLLM compile their grammars, on threads.

    Requests are checked one after the other, since vLLM's manager is not made for more; it compiles on threads of its
    own. The same grammar is compiled once.

    Args:
        prepare: vLLM's `preprocess_add_request`, which starts the compilation.
        wake: called whenever a compilation ends, on some thread.
    """

    def __init__(
        self, vllm_config: VllmConfig, prepare: Callable[[EngineCoreRequest], Prepared], wake: Callable[[], None]
    ) -> None:
        self._config = vllm_config
        self._prepare, self._wake = prepare, wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars", initializer=_yield_to_all)
        self._ended: queue.SimpleQueue[Compilation] = queue.SimpleQueue()

    def start(self, request: EngineCoreRequest, work: Callable[[], None] | None = None) -> None:
        """Do the work, check and compile; `take` returns the result."""
        self._thread.submit(self._run, request, work)

    @property
    def ready(self) -> bool:
        """Whether `take` would return something at once."""
        return not self._ended.empty()

    def take(self, timeout: float = 0.0) -> list[Compilation]:
        """Return the compilations that have ended. Wait up to `timeout` seconds for the first."""
        ended: list[Compilation] = []
        try:
            while True:
                ended.append(self._ended.get(timeout=0 if ended else timeout))
        except queue.Empty:
            return ended

    def close(self) -> None:
        """End the thread once it has checked what it is at."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, request: EngineCoreRequest, work: Callable[[], None] | None) -> None:
        try:
            if work is not None:
                work()
            if needs_grammar(request):
                self._verify(cast("SamplingParams", request.sampling_params))
            prepared = self._prepare(request)
            structured = prepared[0].structured_output_request
            grammar = structured._grammar if structured is not None else None
            if isinstance(grammar, Future):
                grammar.add_done_callback(lambda done: self._end(request, prepared, done.exception()))
            else:
                self._end(request, prepared, None)
        except Exception as error:  # noqa: BLE001 - the request ends with it
            self._end(request, None, error)

    def _verify(self, params: SamplingParams) -> None:
        config = self._config
        tokenizer = cached_tokenizer_from_config(config.model_config)
        params.verify(config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer)

    def _end(self, request: EngineCoreRequest, prepared: Prepared | None, error: BaseException | None) -> None:
        structured = prepared[0].structured_output_request if prepared is not None else None
        if error is not None:
            self._ended.put(Compilation(request, error=_as_error(request, error)))
        else:
            if structured is not None and isinstance(structured.grammar, StructuredOutputGrammar):
                structured.grammar = cast("Any", TimedGrammar(structured.grammar, _form(request)))
            self._ended.put(Compilation(request, prepared))
        self._wake()


def _yield_to_all() -> None:
    """Give this thread, and those that vLLM and xgrammar start from it, the lowest priority.

    A schema of 43 bytes can keep all cores busy for a minute.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


def _form(request: EngineCoreRequest) -> str:
    structured: Any = request.sampling_params.structured_outputs if request.sampling_params is not None else None
    return next((name for name in STRUCTURES if getattr(structured, name, None) is not None), "")


def _as_error(request: EngineCoreRequest, error: BaseException) -> OmniError:
    if isinstance(error, OmniError):
        return error
    form = _form(request)
    # What vLLM's backends raise for a grammar that they cannot take.
    if form and isinstance(error, ValueError | TypeError | RuntimeError | KeyError | VLLMClientError):
        return InvalidRequest(
            f"structured_outputs.{form} cannot be used: {str(error)[:2000]}", field=f"structured_outputs.{form}"
        )
    return EngineError(f"The request could not be prepared: {type(error).__name__}: {error}")
