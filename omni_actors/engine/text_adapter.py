"""What the models have in common that write text: tokens and parameters in, text and tool calls out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.tokenizers import TokenizerLike, cached_tokenizer_from_config
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from omni_actors.engine.adapter import Admission, AutoregressiveAdapter, RequestOutputs
from omni_actors.engine.core import make_request
from omni_actors.engine.lora import LoraAdapters
from omni_actors.engine.sampling import check_prompt_logprobs, make_sampling_params
from omni_actors.engine.text_decoder import TextDecoder
from omni_actors.errors import InvalidPayload, InvalidRequest
from omni_actors.protocol.payloads import StageParams
from omni_actors.protocol.tools import TOOLS, Tools
from omni_actors.stage.engine_interface import EngineEvent, StageInputs, StageRequest, TextEvent

if TYPE_CHECKING:
    from omni_actors.engine.tool_calls import ToolCallReader


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
            events.append(replace(event, logprobs=logprobs) if logprobs else event)
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
        self.lora = LoraAdapters(self.model_config.adapters)
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
        lora = self.lora.request(params.adapter)
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
