"""The model-specific part of an AR engine, and what those of models that write have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from msgspec import Struct
from vllm.config import VllmConfig
from vllm.logprobs import Logprob
from vllm.lora.request import LoRARequest
from vllm.tokenizers import TokenizerLike, cached_tokenizer_from_config
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor

from omni_actors.config import unknown_adapter
from omni_actors.engine.arguments import OmniModelConfig, lora_requests
from omni_actors.engine.core import make_request
from omni_actors.engine.sampling import check_prompt_logprobs, make_sampling_params
from omni_actors.engine.scheduler import RowStream
from omni_actors.errors import EngineError, InvalidPayload, InvalidRequest, PromptTooLong
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import (
    PIECE_LOGPROBS,
    TOOLS,
    PositionLogprobs,
    PromptPosition,
    StageParams,
    TokenLogprob,
    Tools,
)
from omni_actors.stage.engine_interface import EngineEvent, EngineFacts, StageInputs, StageRequest, TextEvent

if TYPE_CHECKING:
    from omni_actors.engine.tool_calls import ToolCallReader


class RequestOutputs(ABC):
    """Turns the outputs of one request into events, in order.

    Attributes:
        stopped: set by `convert` to end the request although the model would go on.
        stop_reason: set by `convert` with what ended a text, if not the model's own end.
        writes: whether the tokens are an answer.
        language: set by `convert` to what the model calls the language of what it heard.
    """

    stopped: bool = False
    stop_reason: int | str | None = None
    writes: bool = True
    language: str = ""

    @abstractmethod
    def convert(self, output: EngineCoreOutput) -> Sequence[EngineEvent]:
        """Events of one output, except the final `FinishedEvent`. The last output has a `finish_reason`."""


class Parts(ABC):
    """Interface of the outputs of a request that vLLM computes in parts, as rows arrive.

    A part is a request of vLLM that begins with all that was before it, so an ordinary one for the scheduler. The
    engine asks for the next when one has ended, and when rows have come.

    Attributes:
        goes_on: set by `convert` at the end of a part if another one follows.
    """

    goes_on: bool = False

    @abstractmethod
    def extend(self, rows: torch.Tensor | None, *, complete: bool) -> None:
        """Take further rows [n, width]."""

    @abstractmethod
    def next_part(self) -> tuple[EngineCoreRequest, RowStream] | None:
        """The part to compute now, under an id of its own; None while one is computed, or its rows are missing."""


class PromptOnly(RequestOutputs):
    """Of a request that only computes its prompt (`max_tokens` 0); vLLM makes one token nevertheless."""

    writes = False

    def convert(self, output: EngineCoreOutput) -> Sequence[EngineEvent]:
        """Nothing."""
        return ()


class Admission(Struct, frozen=True):
    """A checked request, ready for the core.

    Args:
        stream: set if it takes rows while it runs.
        row_per_position: it is to be given a row of each position (`start` and `rows` of the attachments), also of
            those that come from the prefix cache.
        work: what has to be done before the core may have the request, and takes long; it runs on another thread.
    """

    request: EngineCoreRequest
    outputs: RequestOutputs
    stream: RowStream | None = None
    row_per_position: bool = False
    work: Callable[[], None] | None = None


class AutoregressiveAdapter(ABC):
    """Checks everything that comes from outside before it reaches vLLM. An engine has one adapter.

    Args:
        defaults: sampling parameters for those that a request leaves open.
    """

    def __init__(self, vllm_config: VllmConfig, model_config: OmniModelConfig, defaults: StageParams) -> None:
        self.vllm_config = vllm_config
        self.model_config = model_config
        self.defaults = defaults
        self.max_model_len: int = vllm_config.model_config.max_model_len
        # Declared as a name, too; vLLM has resolved it.
        self.model_dtype = cast("torch.dtype", vllm_config.model_config.dtype)
        self.vocabulary: int = vllm_config.model_config.get_vocab_size()
        self.lora: Mapping[str, LoRARequest] = {}  # adapters by name

    @property
    def facts(self) -> EngineFacts:
        """What the coordinator learns when the stage is ready."""
        return EngineFacts(max_input_tokens=self.max_model_len - 1)

    @abstractmethod
    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check a request and build vLLM's request for it. Raises `OmniError`; keeps no state."""

    def read_rows(self, rows: HostTensor) -> torch.Tensor:
        """Check streamed rows [n, width]; return them on the CPU as the worker takes them. Raises `InvalidPayload`."""
        raise InvalidPayload("This model takes no streamed rows.")

    def read_tokens(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Check n streamed tokens; return what the worker takes, on the CPU: [n, ...]. Raises `InvalidPayload`."""
        raise InvalidPayload("This model takes no streamed tokens.")

    def read_text(self, text: str) -> torch.Tensor:
        """Tokenize more of a text that is spoken; return what the worker takes, as `read_tokens`."""
        raise InvalidPayload("This model takes no text in parts.")

    @abstractmethod
    def warm_up_inputs(self, length: int) -> StageInputs:
        """Valid input of about `length` positions, from which more than one row or token can follow."""

    def check_length(self, n_tokens: int) -> None:
        """Raise `PromptTooLong` unless at least one token can follow `n_tokens`."""
        if n_tokens >= self.max_model_len:
            raise PromptTooLong(
                f"The prompt has {n_tokens} tokens; this stage takes at most {self.max_model_len - 1} "
                f"(max_model_len {self.max_model_len})."
            )


CONTEXT = 4  # positions before a token from which vLLM completes a character


class TextDecoder:
    """vLLM's incremental detokenizer, and which tokens the text given out so far consists of.

    With stop strings the detokenizer keeps back as many characters as could begin one. Whatever follows the text, such
    as speech, must not run ahead of it: `released` counts the tokens that are certain to be part of the answer.

    Attributes:
        stopped: whether a stop string ended the text; the request is over, although the model would go on.
        stop_reason: that string, or the token that ended the text if it is not the model's end.
        released: tokens of the answer whose text has been given out. At the end of a text that a string has stopped,
            the tokens of that string are not among them, unless their text begins before it or is part of the answer.
    """

    def __init__(self, tokenizer: TokenizerLike, request: EngineCoreRequest) -> None:
        made = IncrementalDetokenizer.from_new_request(tokenizer, request)
        if not isinstance(made, BaseIncrementalDetokenizer):
            raise EngineError("vLLM made no detokenizer for this model.")
        self._detokenizer = made
        self._logprobs = LogprobsProcessor.from_new_request(tokenizer, request)
        self._holds = bool(made.stop) and not made.include_stop_str_in_output
        self.stopped = False
        self.stop_reason: int | str | None = None
        self._end = tokenizer.eos_token_id
        self.released = 0
        self._given = 0  # characters
        self._held: deque[tuple[int, int]] = deque()  # where the text of each token not released begins and ends

    def decode(self, output: EngineCoreOutput) -> tuple[str, list[int]]:
        """The new text, and the new tokens up to the one that ends it."""
        tokens: list[int] = []
        terminated = output.finish_reason is VllmFinishReason.STOP  # by its last token, which is not text
        for index, token in enumerate(output.new_token_ids):
            before = len(self._detokenizer.output_text)
            last = index + 1 == len(output.new_token_ids)
            stop = self._detokenizer.update([token], terminated and last)
            self.stopped = stop is not None
            self.stop_reason = stop
            tokens.append(token)
            self._held.append((before, len(self._detokenizer.output_text)))
            if self.stopped:
                break
        if terminated and not self.stopped and output.stop_reason != self._end:
            self.stop_reason = output.stop_reason
        finished = self.stopped or output.finish_reason is not None
        text = self._detokenizer.get_next_output_text(finished, True)
        self._given += len(text)
        self._release(finished)
        return text, tokens

    def logprobs(self, output: EngineCoreOutput, count: int) -> tuple[PositionLogprobs, ...]:
        """The log probabilities of the first `count` new tokens; none if the request asks for none."""
        wanted = self._logprobs.num_logprobs
        if wanted is None or not output.new_token_ids:
            return ()
        self._logprobs.update_from_output(output)
        kept = cast("list[dict[int, Logprob]]", self._logprobs.logprobs)
        positions = kept[-len(output.new_token_ids) :][:count]
        del kept[:-CONTEXT]
        ranked = (_ranked(position, wanted) for position in positions)
        return tuple(PositionLogprobs(token, top) for token, _, top in ranked)

    def prompt_logprobs(self, output: EngineCoreOutput) -> Iterator[tuple[PromptPosition, ...]]:
        """The log probabilities of the prompt, which come with the first output, in pieces for a message each.

        Call it after `logprobs`, which reads the output unless the request does not ask for those of the answer.
        """
        wanted = self._logprobs.num_prompt_logprobs
        if wanted is None or output.new_prompt_logprobs_tensors is None:
            return
        if self._logprobs.num_logprobs is None:
            self._logprobs.update_from_output(output)
        # vLLM has nothing for the first position, which follows none.
        found = cast("list[dict[int, Logprob]]", self._logprobs.prompt_logprobs)[1:]
        self._logprobs.prompt_logprobs = []
        size = PIECE_LOGPROBS // (wanted + 1)
        for start in range(0, len(found), size):
            yield tuple(PromptPosition(*_ranked(position, wanted)) for position in found[start : start + size])

    def _release(self, finished: bool) -> None:
        if self.stopped:
            count = sum(start < self._given for start, _ in self._held)
        elif finished or not self._holds:
            count = len(self._held)
        else:
            # A token without text may begin a character that the next one completes: the two go together.
            certain = [index for index, (start, end) in enumerate(self._held, 1) if start < end <= self._given]
            count = certain[-1] if certain else 0
        self.released += count
        for _ in range(count):
            self._held.popleft()


def _ranked(position: dict[int, Logprob], wanted: int) -> tuple[TokenLogprob, int, tuple[TokenLogprob, ...]]:
    """The token that is there, which vLLM has first, its rank, and the `wanted` likeliest in order."""
    entries = [TokenLogprob(token, entry.decoded_token or "", entry.logprob) for token, entry in position.items()]
    ranks = [entry.rank or 0 for entry in position.values()]
    ranked = sorted(zip(ranks, entries, strict=True), key=lambda pair: pair[0])
    return entries[0], ranks[0], tuple(entry for rank, entry in ranked if rank <= wanted)


class TextOutputs(RequestOutputs):
    """Turns new tokens into new text, tool calls and log probabilities."""

    def __init__(self, request_id: str, decoder: TextDecoder, calls: ToolCallReader | None = None) -> None:
        self._request_id = request_id
        self._decoder = decoder
        self._calls = calls

    def convert(self, output: EngineCoreOutput) -> Sequence[EngineEvent]:
        """The new text, with the pieces of tool calls in it."""
        events: list[EngineEvent] = []
        if output.new_token_ids:
            text, token_ids = self._decoder.decode(output)
            event = self._text(text, token_ids, output.finish_reason is not None or self._decoder.stopped)
            logprobs = self._decoder.logprobs(output, len(token_ids))
            for piece in self._decoder.prompt_logprobs(output):
                events.append(TextEvent(self._request_id, "", (), prompt_logprobs=piece))
            events.append(msgspec.structs.replace(event, logprobs=logprobs) if logprobs else event)
        self.stopped, self.stop_reason = self._decoder.stopped, self._decoder.stop_reason
        return events

    def _text(self, text: str, token_ids: list[int], finished: bool) -> TextEvent:
        if self._calls is None:
            return TextEvent(self._request_id, text, token_ids)
        content, calls = self._calls.read(text, token_ids, finished)
        return TextEvent(self._request_id, content, token_ids, calls)


class TextAdapter(AutoregressiveAdapter):
    """Turns token ids into a vLLM request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model_config = self.vllm_config.model_config
        self._tokenizer = cached_tokenizer_from_config(model_config)
        generation = model_config.try_get_generation_config()
        ends = generation.get("eos_token_id", self._tokenizer.eos_token_id)
        self.end_token_ids = frozenset(ends if isinstance(ends, list) else [ends])
        self.lora = lora_requests(self.model_config.adapters)
        self._make_reader = reader_maker(self.model_config.tool_call_parser, self._tokenizer)

    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check tokens and parameters. Raises `OmniError` for what the model cannot take."""
        if inputs.tensors:
            raise InvalidPayload(f"This model takes token ids only; it got the tensors {sorted(inputs.tensors)[:8]}.")
        token_ids = list(inputs.token_ids)
        self.check_tokens(token_ids)
        calls = self.tool_calls(inputs, token_ids)
        core_request = self.make_request(request, token_ids, calls)
        decoder = TextDecoder(self._tokenizer, core_request)
        return Admission(core_request, TextOutputs(request.request_id, decoder, calls))

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raise `OmniError` for a prompt that is empty, too long, or has other tokens than the model."""
        if not token_ids:
            raise InvalidRequest("The prompt is empty.", field="prompt")
        self.check_length(len(token_ids))
        if beyond := [token for token in token_ids if not 0 <= token < self.vocabulary]:
            raise InvalidPayload(f"Token ids {beyond[:8]} are outside the vocabulary of {self.vocabulary}.")

    def make_request(
        self,
        request: StageRequest,
        token_ids: list[int] | None,
        calls: ToolCallReader | None,
        *,
        payload: Any = None,
        read_prefix_cache: bool = True,
        **features: Any,
    ) -> EngineCoreRequest:
        """vLLM's request.

        Args:
            token_ids: the prompt; `None` for embeddings that have no tokens.
            features: further arguments of `core.make_request`.
        """
        params = _formed(request.params, calls).merged_over(self.defaults)
        check_prompt_logprobs(params, len(token_ids or ()), embeds=features.get("prompt_embeds") is not None)
        if params.adapter is not None and params.adapter not in self.lora:
            raise unknown_adapter(params.adapter, self.lora)
        lora = self.lora[params.adapter] if params.adapter is not None else None
        sampling = make_sampling_params(
            params,
            seed=request.effective_seed,
            end_token_ids=self.end_token_ids,
            vocabulary=self.vocabulary,
            payload=payload,
            read_prefix_cache=read_prefix_cache,
            tokenizer=self._tokenizer,
        )
        if calls is not None and not calls.skip_special_tokens:
            sampling.skip_special_tokens = False  # in some models they mark the calls
        return make_request(
            request.request_id, token_ids, sampling, priority=request.priority, lora_request=lora, **features
        )

    def tool_calls(self, inputs: StageInputs, token_ids: Sequence[int]) -> ToolCallReader | None:
        """The reader of the request's tool calls, if it may make any."""
        if TOOLS not in inputs.lists:
            return None
        tools = Tools.unpacked(inputs.lists[TOOLS])
        if tools.choice == "none":
            return None
        if self._make_reader is None:
            raise InvalidRequest(
                "tools: this stage has no parser for calls.", hint="Set tool_call_parser.", field=TOOLS
            )
        return self._make_reader(tools, token_ids)

    def warm_up_inputs(self, length: int) -> StageInputs:
        """Prompt of `length` times the first token."""
        return StageInputs(token_ids=[0] * length)


def _formed(params: StageParams, calls: ToolCallReader | None) -> StageParams:
    """Add the form that calls of tools must have."""
    if calls is None or calls.form is None:
        return params
    if params.structured_outputs is not None:
        raise InvalidRequest(
            "tool_choice: a form of the text, such as a response_format, cannot go with calls that must have theirs.",
            hint="Leave one of them out.",
            field="tool_choice",
        )
    return msgspec.structs.replace(params, structured_outputs=calls.form)


def reader_maker(name: str | None, tokenizer: TokenizerLike) -> Callable[[Tools, Sequence[int]], ToolCallReader] | None:
    """What makes the readers of tool calls, with vLLM's parser of this name. Raises `ConfigError` for a wrong one."""
    if name is None:
        return None  # vLLM's parsers take seconds to import
    from omni_actors.engine.tool_calls import ToolCallReader, parser_class

    parser = parser_class(name, tokenizer)
    return lambda tools, prompt: ToolCallReader(parser, tokenizer, tools, prompt)
