"""Runs one stage alone in this process, without coordinator or sockets: to try a stage, to test or to measure it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from omni_actors.client.outputs import OmniRequestOutput, OmniTokensPrompt
from omni_actors.engine.factory import OmniEngineArgs, build_engine
from omni_actors.errors import InvalidRequest, OmniError
from omni_actors.protocol.payloads import StageParams
from omni_actors.protocol.tensors import HostTensor
from omni_actors.stage.engine_interface import (
    AudioEvent,
    EngineEvent,
    ErrorEvent,
    FinishedEvent,
    StageInputs,
    StageRequest,
    StreamEvent,
    TextEvent,
)

StagePrompt = StageInputs | OmniTokensPrompt


class StageLLM:
    """A loaded stage. `generate` batches its prompts. Use it as a context manager, or call `shutdown`.

    Args:
        arguments: model, stage and vLLM's engine arguments.

    Raises:
        ConfigError: the arguments are wrong.
        StartupError: the model does not load.
    """

    def __init__(self, arguments: OmniEngineArgs) -> None:
        self.stage = arguments.model_config.model_stage
        self.engine = build_engine(arguments)
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Sequence[StagePrompt],
        params: StageParams | Sequence[StageParams] | None = None,
        *,
        seed: int = 0,
        voice: str | None = None,
        streams: bool = True,
    ) -> list[OmniRequestOutput]:
        """Return one result per prompt, in order. A prompt that is refused sets its own result's `error` only.

        Args:
            prompts: token ids with named tensors and scalars, or complete stage inputs.
            params: sampling parameters for all prompts, or one for each.
            seed: prompt i gets `seed + i`, unless its parameters name a seed.
            voice: speaker of all prompts.
            streams: whether to compute and return what the next stage would receive (`OmniRequestOutput.tensors`).

        Raises:
            InvalidRequest: the number of parameters is not the number of prompts.
        """
        if params is None or isinstance(params, StageParams):
            params = [params or StageParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(params)} parameters.")
        results: dict[str, OmniRequestOutput] = {}
        pieces: dict[tuple[str, str], list[HostTensor]] = defaultdict(list)
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            result = OmniRequestOutput(f"{self.stage}-{next(self._numbers)}")
            results[result.request_id] = result
            request = StageRequest(result.request_id, own, seed=seed + index, voice=voice, streams=streams)
            try:
                self.engine.start(request, as_inputs(prompt))
            except OmniError as error:
                result.error = error
        while self.engine.runnable():
            for event in self.engine.step():
                self._collect(results[event.request_id], event, pieces)
        for (request_id, name), parts in pieces.items():
            results[request_id].tensors[name] = join(parts)
        return list(results.values())

    def _collect(
        self, result: OmniRequestOutput, event: EngineEvent, pieces: dict[tuple[str, str], list[HostTensor]]
    ) -> None:
        match event:
            case TextEvent():
                result.text += event.text
                result.token_ids.extend(event.token_ids)
            case AudioEvent():
                samples = np.frombuffer(event.samples.data, dtype=np.float32)
                result.audio = samples if result.audio is None else np.concatenate([result.audio, samples])
                result.sample_rate = event.sample_rate
            case StreamEvent():
                result.token_ids.extend(event.token_ids)
                for name, tensor in event.tensors.items():
                    pieces[result.request_id, name].append(tensor)
            case FinishedEvent():
                result.finish_reasons[self.stage] = event.reason.value
            case ErrorEvent():
                result.error = event.error

    def shutdown(self) -> None:
        """Free the engine. The object is not used afterwards."""
        self.engine.shutdown()

    def __enter__(self) -> StageLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def as_inputs(prompt: StagePrompt) -> StageInputs:
    """Convert a prompt in either form to stage inputs."""
    if isinstance(prompt, StageInputs):
        return prompt
    return StageInputs(
        token_ids=prompt["prompt_token_ids"], tensors=prompt.get("tensors", {}), scalars=prompt.get("scalars", {})
    )


def join(parts: Sequence[HostTensor]) -> HostTensor:
    """Join tensors along their first dimension; they agree in dtype and in the other dimensions."""
    if len(parts) == 1:
        return parts[0]
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return HostTensor(parts[0].dtype, shape, b"".join(bytes(part.data) for part in parts))
