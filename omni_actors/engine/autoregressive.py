"""The engine of an autoregressive (AR) stage."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from msgspec import Struct
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason

from omni_actors.engine.adapter import AutoregressiveAdapter, Parts, PromptOnly, RequestOutputs
from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.core import VllmCore, VllmEngine
from omni_actors.engine.rows import FollowedRows
from omni_actors.engine.sampling import GrammarCompiler, Prepared, TimedGrammar, needs_grammar
from omni_actors.engine.workers.base import attach, attachment_of
from omni_actors.errors import EngineError, InvalidPayload, ModelOutputInvalid, OmniError
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.messages import FinishReason
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import EngineEvent, EngineFacts, FinishedEvent, StageInputs, StageRequest
from omni_actors.telemetry.metrics import Metric

if TYPE_CHECKING:
    from omni_actors.engine.scheduler import OmniSchedulerMixin

logger = logging.getLogger(__name__)

_REASONS = {
    VllmFinishReason.STOP: FinishReason.STOP,
    VllmFinishReason.LENGTH: FinishReason.LENGTH,
    VllmFinishReason.REPETITION: FinishReason.STOP,
}


WAIT_SECONDS = 60.0  # of a step that has nothing to do but to wait for grammars
WARM_UP_LENGTH = 24
# vLLM and Triton have separate code for one request, for few and for multiples of 16; and to sample by top_p four
# kernels (0.8 s each) for each power of two that fits into a GPU's multiprocessors, or a part of them, by request.
WARM_UP_BATCHES = (1, 2, 4, 8, 9, 16, 17, 32, 64)
WARM_UP_SECONDS = 20.0  # after which prompts that compile kernels are left to requests
# Requests of one batch. top_k and top_p have kernels for both, for the first and, where the model has no top_k, for the
# second.
WARM_UP_MIXES = (
    (
        StageParams(
            max_tokens=3, min_tokens=3, temperature=0.9, top_k=40, top_p=0.8, min_p=0.01, repetition_penalty=1.05
        ),
        StageParams(max_tokens=3, temperature=0.0, repetition_penalty=1.0),
    ),
    (StageParams(max_tokens=3, min_tokens=3, temperature=0.9, top_k=40, top_p=1.0),),
    (StageParams(max_tokens=3, min_tokens=3, temperature=0.9, top_p=0.8),),
)


class _Running(Struct):
    outputs: RequestOutputs
    input_tokens: int
    follows_rows: bool = False
    rows: FollowedRows | None = None
    grammar: TimedGrammar | None = None
    output_tokens: int = 0
    part: str | None = None  # id of the part that vLLM computes after the first, or has computed


class AutoregressiveEngine(VllmEngine[_Running]):
    """Runs one AR model in a vLLM core.

    Raises:
        ConfigError, StartupError: see `OmniEngineArgs.create_engine_config` and `VllmCore`.
    """

    def __init__(self, arguments: OmniEngineArgs) -> None:
        vllm_config = arguments.create_engine_config()
        adapter_class, defaults = arguments.adapter_class(AutoregressiveAdapter), arguments.model_spec().params
        self.adapter: AutoregressiveAdapter = adapter_class(vllm_config, arguments.model_config, defaults)
        super().__init__(VllmCore(vllm_config))
        for adapter in self.adapter.lora.values():
            self.core.load_adapter(adapter)
        self._grammars = GrammarCompiler(vllm_config, self.core.prepare, lambda: self.wake())
        self._compiling: dict[str, EngineCoreRequest] = {}  # requests that are not in the core yet
        self._parts: dict[str, str] = {}  # of which requests are parts after the first; by their id in the core

    @property
    def _scheduler(self) -> OmniSchedulerMixin:
        # The arguments of an autoregressive stage name one of its classes.
        return cast("OmniSchedulerMixin", self.core.scheduler)

    @property
    def facts(self) -> EngineFacts:
        """What the coordinator learns when the stage is ready."""
        return self.adapter.facts

    def warm_up(self, batches: Sequence[int] = ()) -> None:
        """Run batches like those of real requests, and prompts of more tokens: no request is to wait for a compiler.

        Compiling takes many seconds if nothing is cached; a stage that did it while it holds requests would look stuck.
        Kernels differ by the number of requests and by the sampling; those of a model's experts by the number of tokens
        (`workers/gpu.py`).

        Args:
            batches: the numbers of requests to run at a time, one batch after the other; by default those that matter.

        Raises:
            EngineError: a request of the warm-up fails, as all later ones would.
        """
        for size, mix in itertools.product(batches or self._batches(), WARM_UP_MIXES):
            for index in range(size):
                request = StageRequest(f"_warm_up/{index}", mix[index % len(mix)], seed=index)
                self.start(request, self.adapter.warm_up_inputs(WARM_UP_LENGTH))
            self._run_warm_up()
        self.core.compile_prompt_kernels(WARM_UP_SECONDS)
        self.core.forget_warm_up()

    def _batches(self) -> list[int]:
        """Nothing is compiled on the CPU; one request is enough to make a model that cannot run fail at the start."""
        config = self.core.vllm_config
        compiles = config.device_config.device_type == "cuda"
        return [size for size in WARM_UP_BATCHES if size <= (config.scheduler_config.max_num_seqs if compiles else 1)]

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        """Have the adapter check the request, and give it to vLLM; see `StageEngine.start`."""
        request_id = request.request_id
        self._check_new(request_id)
        admission = self.adapter.admit(request, inputs)
        if (stream := admission.stream) is not None:
            self._scheduler.open_stream(request_id, stream)
        given = admission.request
        prompt_tokens = length_from_prompt_token_ids_or_embeds(given.prompt_token_ids, given.prompt_embeds)
        outputs = PromptOnly() if request.params.max_tokens == 0 else admission.outputs
        running = _Running(outputs, prompt_tokens, admission.row_per_position)
        if needs_grammar(admission.request) or admission.work is not None:
            self._compiling[request_id] = admission.request
            self._grammars.start(admission.request, admission.work)
        else:
            self._add(admission.request, running)
        self._requests[request_id] = running

    def _add(self, request: EngineCoreRequest, running: _Running, prepared: Prepared | None = None) -> None:
        try:
            prepared = prepared or self.core.prepare(request)
            structured = prepared[0].structured_output_request
            if structured is not None and isinstance(structured.grammar, TimedGrammar):
                running.grammar = structured.grammar
            if running.follows_rows:
                running.rows = self._scheduler.follow(prepared[0])
            self.core.add(prepared)
        except Exception as error:  # vLLM raises several kinds; the engine goes on without this request
            self._scheduler.close_stream(request.request_id)
            self._scheduler.unfollow(request.request_id)
            raise EngineError(f"vLLM refuses the request: {type(error).__name__}: {error}") from error

    def _add_part(self, request_id: str, running: _Running) -> None:
        """Give vLLM the next part of a request, if there is one now."""
        if not isinstance(running.outputs, Parts) or (part := running.outputs.next_part()) is None:
            return
        request, stream = part
        running.part = request.request_id
        running.input_tokens += stream.text_tokens
        self._parts[running.part] = request_id
        self._scheduler.open_stream(running.part, stream)
        self._add(request, running)

    def _extend(
        self, request_id: str, running: _Running, rows: HostTensor | None, token_ids: Sequence[int], complete: bool
    ) -> None:
        if rows is not None and token_ids:
            raise InvalidPayload("A stage takes either rows or tokens in one message.")
        tensor = self.adapter.read_tokens(token_ids) if token_ids else None
        if rows is not None:
            tensor = self.adapter.read_rows(rows)
        if isinstance(running.outputs, Parts):
            running.outputs.extend(tensor, complete=complete)
            self._add_part(request_id, running)
        else:
            self._scheduler.push_rows(request_id, tensor, complete=complete)

    def extend_text(self, request_id: str, text: str, *, complete: bool) -> None:
        """See `StageEngine.extend_text`."""
        if request_id in self._requests:
            rows = self.adapter.read_text(text) if text else None
            self._scheduler.push_rows(request_id, rows, complete=complete)

    def over_budget(self) -> bool:
        """Whether requests, those that wait included, hold more rows than the budget admits."""
        return not self._scheduler.budget.rows.fits()

    def statistics(self) -> Mapping[Metric, float]:
        """Totals of vLLM's scheduler, and the state of the budget of rows."""
        return {**super().statistics(), **self._scheduler.budget.statistics()}

    def waits_for_input(self, request_id: str) -> bool:
        """Whether the request's next row is missing."""
        running = self._requests.get(request_id)
        if running is not None and isinstance(running.outputs, Parts):
            return running.outputs.goes_on
        return self._scheduler.waits_for_input(request_id)

    def abort(self, request_id: str) -> None:
        """Drop a request in vLLM too. Unknown ids are ignored."""
        running = self._requests.pop(request_id, None)
        if running is None:
            return
        if self._compiling.pop(request_id, None) is not None:
            self._scheduler.close_stream(request_id)
        else:
            self.core.abort([running.part or request_id])
            self._parts.pop(running.part or "", None)

    def runnable(self) -> bool:
        """Whether the core would do something in a step, or a grammar is compiled."""
        return super().runnable() or self._grammars.ready

    def busy(self) -> bool:
        """Whether grammars are being compiled, or other work is done for requests."""
        return bool(self._compiling)

    def counts(self) -> dict[str, int]:
        """Requests for which work is done on another thread, and those of the core."""
        return {"compiling": len(self._compiling), "parts": len(self._parts), **super().counts()}

    def shutdown(self) -> None:
        """Drop all requests, end the compiler's thread and shut the core down."""
        self._compiling.clear()
        self._grammars.close()
        super().shutdown()

    def _add_compiled(self) -> list[EngineEvent]:
        """Give requests whose grammar is compiled to the core; wait for one if there is nothing else to do."""
        if not self._grammars.ready and (not self._compiling or super().runnable()):
            return []
        events: list[EngineEvent] = []
        for compilation in self._grammars.take(WAIT_SECONDS):
            request = compilation.request
            if self._compiling.get(request.request_id) is not request:
                continue  # it was aborted
            try:
                if compilation.error is not None:
                    raise compilation.error
                del self._compiling[request.request_id]
                self._add(request, self._requests[request.request_id], compilation.prepared)
            except OmniError as error:
                events += self._failed(request.request_id, error)
        return events

    def step(self) -> Sequence[EngineEvent]:
        """Do one step of vLLM, with the requests whose grammars are compiled by now."""
        return [*self._add_compiled(), *super().step()]

    def _request_of(self, computed: str) -> str:
        return self._parts.get(computed, computed)  # the first part has the id of its request

    def take_scheduled(self) -> Sequence[tuple[str, float]]:
        """Requests that vLLM scheduled for the first time since the last call, and when."""
        return self.core.statistics.take_scheduled()

    def _take(self, request_id: str, running: _Running, output: EngineCoreOutput) -> list[EngineEvent]:
        if output.finish_reason is not None:
            self._parts.pop(output.request_id, None)
        if output.finish_reason in (VllmFinishReason.ERROR, VllmFinishReason.ABORT):
            raise EngineError(f"vLLM ended the request: {output.finish_reason}.")
        if output.num_nans_in_logits:
            raise ModelOutputInvalid(f"The model's logits hold NaN ({output.num_nans_in_logits} of them).")
        if running.grammar is not None:
            running.grammar.check()
        if running.rows is not None and (emitted := attachment_of(output)):
            attach(output, running.rows.complete(emitted))
        events = list(running.outputs.convert(output))
        running.output_tokens += len(output.new_token_ids) if running.outputs.writes else 0
        if isinstance(running.outputs, Parts) and running.outputs.goes_on:
            self._add_part(request_id, running)
            return events
        stopped = running.outputs.stopped
        if output.finish_reason is None and not stopped:
            return events
        if output.finish_reason is None:
            self.core.abort([request_id])
        reason = FinishReason.STOP if output.finish_reason is None or stopped else _REASONS[output.finish_reason]
        ended_by, language = running.outputs.stop_reason, running.outputs.language
        tokens = running.input_tokens, running.output_tokens
        done = FinishedEvent(request_id, reason, *tokens, ended_by, language=language)
        return [*events, self._finished(done)]
