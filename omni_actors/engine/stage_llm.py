"""One stage alone, in this process: `StageLLM`."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from omni_actors.client.offline import OneStageParams, is_list, params_by_stage, spread
from omni_actors.client.prompts import (
    MULTI_MODAL_DATA,
    PROMPT_KEYS,
    STAGE_KEYS,
    information_values,
    prompt_embeds,
    refuse_unknown_keys,
    to_prompt,
)
from omni_actors.client.streams import CollectedItems, OmniRequestOutput, OmniTokensPrompt, item_of
from omni_actors.config import StageKind
from omni_actors.engine.arguments import OmniEngineArgs, build_engine
from omni_actors.engine.prompt import PromptEngine
from omni_actors.errors import EngineError, InvalidRequest, OmniError, suggest
from omni_actors.protocol.codec import BufferList, Envelope
from omni_actors.protocol.fields import Header, HostTensor, Priority
from omni_actors.protocol.messages import StageUsage, Submit
from omni_actors.protocol.payloads import ADDITIONAL_INFORMATION, PROMPT_EMBEDS, InformationValue, StageParams
from omni_actors.stage.engine_interface import (
    EngineEvent,
    EngineFacts,
    ErrorEvent,
    FinishedEvent,
    LatentsEvent,
    ProgressEvent,
    StageInputs,
    StageRequest,
    StreamEvent,
)
from omni_actors.stage.outbound import result_of
from omni_actors.stage.processors import concatenate_rows, start_of

StagePrompt = StageInputs | OmniTokensPrompt


class StagePrompts:
    """Reads prompts for one stage.

    Args:
        arguments: of the stage.
        facts: of its engine, which says what additional information it wants.
    """

    def __init__(self, arguments: OmniEngineArgs, facts: EngineFacts) -> None:
        self._arguments = arguments
        self._stage = arguments.model_config.model_stage
        self._facts = facts
        self._prompt_engine: PromptEngine | None = None

    def read(self, prompt: StagePrompt) -> tuple[StageInputs, dict[str, InformationValue]]:
        """Return a prompt's stage inputs and additional information. Raises `OmniError` for what cannot be read."""
        if isinstance(prompt, StageInputs):
            return prompt, {}
        if not isinstance(prompt, Mapping):
            raise InvalidRequest(f"A prompt of one stage is a mapping or StageInputs; got {type(prompt).__name__}.")
        refuse_unknown_keys(prompt, OmniTokensPrompt.__annotations__)
        given: Mapping[str, Any] = prompt
        information = self._information(given.get(ADDITIONAL_INFORMATION))
        own = {name: given[name] for name in STAGE_KEYS if name in given}
        if self._arguments.kind == "prompt":
            if own:
                raise InvalidRequest(f"The prompt stage has no input called {', '.join(own)}.")
            return self._prompt_inputs(given), information
        if given.get(MULTI_MODAL_DATA) is not None:
            prepared = self._prepare(given)
            own["tensors"] = {**own.get("tensors", {}), **prepared.tensors}
            return StageInputs(token_ids=prepared.token_ids, **own), information
        if given.get(PROMPT_EMBEDS) is not None:
            own["tensors"] = {**own.get("tensors", {}), PROMPT_EMBEDS: prompt_embeds(given[PROMPT_EMBEDS])}
        return StageInputs(token_ids=given.get("prompt_token_ids", ()), **own), information

    def _information(self, given: Any) -> dict[str, InformationValue]:
        values = information_values(given) if given is not None else {}
        for name in values:
            if name not in (wanted := self._facts.wants_information):
                message = f"{ADDITIONAL_INFORMATION}: the stage {self._stage!r} does not want {name!r}."
                raise InvalidRequest(message + suggest(name, wanted))
        return values

    def _prompt_inputs(self, given: Mapping[str, Any]) -> StageInputs:
        """The inputs of a prompt stage."""
        buffers = BufferList()
        of_prompt = {key: given[key] for key in PROMPT_KEYS if key in given and key != ADDITIONAL_INFORMATION}
        prompt, _ = to_prompt(of_prompt, (), (), (), None, buffers)
        envelope = Envelope(Header(""), Submit(prompt), tuple(buffers.buffers))
        return start_of(prompt, envelope, self._facts).inputs

    def _prepare(self, given: Mapping[str, Any]) -> StreamEvent:
        """What the prompt stage would send to this one for a prompt with media."""
        if self._prompt_engine is None:
            arguments = OmniEngineArgs(self._arguments.model_config, "prompt", self._arguments.engine)
            if arguments.model_spec() is not self._arguments.model_spec():
                raise InvalidRequest(f"{MULTI_MODAL_DATA}: the stage {self._stage!r} takes no media.")
            self._prompt_engine = PromptEngine(arguments)
        self._prompt_engine.start(StageRequest("prompt", StageParams(), 0), self._prompt_inputs(given))
        events = self._prompt_engine.step()
        while not events:
            events = self._prompt_engine.step()
        event = events[0]
        if isinstance(event, ErrorEvent):
            raise event.error
        if not isinstance(event, StreamEvent):
            raise TypeError(f"The prompt stage gave {type(event).__name__}.")
        return event

    def close(self) -> None:
        """Free the prompt stage's engine."""
        if self._prompt_engine is not None:
            self._prompt_engine.shutdown()


class StageLLM:
    """A loaded stage. `generate` batches its prompts. Use it as a context manager, or call `shutdown`.

    It runs in the caller's process, with the same engine as in a pipeline, but without what surrounds it there: no
    deadline, no flow control, no restart.

    Args:
        arguments: model, stage and vLLM's engine arguments.

    Raises:
        ConfigError: the arguments are wrong.
        StartupError: the model does not load.
    """

    def __init__(self, arguments: OmniEngineArgs) -> None:
        self.stage = arguments.model_config.model_stage
        self.engine = build_engine(arguments)
        self._prompts = StagePrompts(arguments, self.engine.facts)
        self._takes_params = StageKind(arguments.kind) is not StageKind.PROMPT
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Sequence[StagePrompt],
        params: OneStageParams | Sequence[OneStageParams] = None,
        *,
        seed: int | Sequence[int] = 0,
        voice: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        streams: bool = True,
    ) -> list[OmniRequestOutput]:
        """Return one result per prompt, in order. A prompt that is refused or fails sets its own result's `error` only.

        A request whose inputs are not complete (`StageInputs.complete`) runs as far as they reach. If it cannot end
        with them, its result keeps what was made until then, with an `InvalidRequest` as `error`.

        Args:
            prompts: an `OmniTokensPrompt`, or stage inputs. The media of a prompt are processed here, as a pipeline's
                prompt stage does.
            params: sampling parameters for all prompts, or a list with those of each: a `StageParams`, a mapping of its
                fields, or `None` for the model's defaults.
            seed: prompt i gets `seed + i`, or the i-th of a list; a seed in its parameters wins.
            voice: speaker of all prompts, or a list with one for each.
            priority: of all prompts, or a list with one for each; the engine takes lower values first where it cannot
                take all at once.
            streams: whether to compute and return what the next stage would receive (`OmniRequestOutput.tensors`).

        Raises:
            InvalidRequest: an argument has the wrong form, or another number of values than there are prompts.
            EngineError: the engine is lost; make a new one.
        """
        if not is_list(prompts):
            raise InvalidRequest(f"prompts is a list of prompts; got a {type(prompts).__name__}.")
        count = len(prompts)
        own_params = self._spread_params(params, count)
        seeds = spread("seed", seed, int, count)
        if not is_list(seed):
            seeds = [first + index for index, first in enumerate(seeds)]
        voices = spread("voice", voice, str | None, count)
        if any(voices) and not self.engine.facts.voices:
            raise InvalidRequest(f"The stage {self.stage!r} has no voices.", hint="Leave out voice.")
        priorities = spread("priority", priority, Priority, count)
        answers: dict[str, _Answer] = {}
        for prompt, own, start, speaker, rank in zip(prompts, own_params, seeds, voices, priorities, strict=True):
            request = StageRequest(f"{self.stage}-{next(self._numbers)}", own, start, speaker, rank, streams)
            answer = answers[request.request_id] = _Answer(self.stage, request.request_id)
            try:
                inputs, information = self._prompts.read(prompt)
                self.engine.start(msgspec.structs.replace(request, information=information), inputs)
            except OmniError as error:
                answer.fail(error)
        self._run(answers)
        return [answer.result() for answer in answers.values()]

    def _spread_params(self, given: OneStageParams | Sequence[OneStageParams], count: int) -> list[StageParams]:
        entries: list[Any] = list(given) if is_list(given) else [given] * count  # checked below
        if len(entries) != count:
            raise InvalidRequest(f"params has {len(entries)} entries for {count} prompts.")
        params = [params_by_stage("params", {self.stage: entry}, [self.stage]) for entry in entries]
        if any(params) and not self._takes_params:
            raise InvalidRequest(f"The stage {self.stage!r} takes no parameters.", hint="Leave out params.")
        return [own.get(self.stage, StageParams()) for own in params]

    def _run(self, answers: Mapping[str, _Answer]) -> None:
        """Step until the engine holds none of the requests, whatever happens."""
        try:
            while self.engine.runnable() or self.engine.busy() or self._end_what_waits(answers):
                for event in self.engine.step():
                    answers[event.request_id].take(event)
        finally:
            for request_id, answer in answers.items():
                if not answer.ended:
                    self.engine.abort(request_id)

    def _end_what_waits(self, answers: Mapping[str, _Answer]) -> bool:
        """End requests that nothing can bring forward; return whether there were any, as their end may free others."""
        left = [request_id for request_id, answer in answers.items() if not answer.ended]
        starving = [request_id for request_id in left if self.engine.waits_for_input(request_id)]
        for request_id in starving or left:
            self.engine.abort(request_id)
            if starving:
                error: OmniError = InvalidRequest(
                    "The inputs are not complete, and a stage that runs alone receives no more.",
                    hint="Pass StageInputs with complete=True.",
                    stage=self.stage,
                )
            else:
                error = EngineError("The engine stopped before the request was complete.", stage=self.stage)
            answers[request_id].fail(error)
        return bool(left)

    def shutdown(self) -> None:
        """Free the engine. The object is not used afterwards."""
        self._prompts.close()
        self.engine.shutdown()

    def __enter__(self) -> StageLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


class _Answer:
    """The result of one request while it is made."""

    def __init__(self, stage: str, request_id: str) -> None:
        self.ended = False
        self._stage = stage
        self._collected = CollectedItems(request_id)
        self._output = self._collected.output
        self._opened = time.monotonic()
        self._first_output: float | None = None
        self._tensors: dict[str, list[HostTensor]] = defaultdict(list)

    def fail(self, error: OmniError) -> None:
        self._output.error = error
        self.ended = True

    def take(self, event: EngineEvent) -> None:
        """Add what an event says."""
        since = time.monotonic() - self._opened
        if self._first_output is None and not isinstance(event, ProgressEvent | FinishedEvent | ErrorEvent):
            self._first_output = since
        match event:
            case StreamEvent():
                self._output.token_ids.extend(event.token_ids)
                for name, tensor in event.tensors.items():
                    self._tensors[name].append(tensor)
            case FinishedEvent():
                self._output.finish_reasons[self._stage] = event.reason.value
                self._output.usage[self._stage] = StageUsage(
                    event.reason, event.input_tokens, event.output_tokens, self._first_output or 0.0, since
                )
                self.ended = True
            case ErrorEvent():
                self.fail(event.error)
            case LatentsEvent(preview=True):
                pass
            case _:  # as in a client that gets it by a message
                body, buffers = result_of(event)
                self._collected.add(item_of(body, Envelope(Header(""), body, tuple(buffers)).tensor))

    def result(self) -> OmniRequestOutput:
        """The result, with its pieces joined."""
        self._output.tensors = {name: concatenate_rows(parts) for name, parts in self._tensors.items()}
        return self._collected.joined()
