"""The engine of an encoder stage: prompts to hidden states, several sequences of a request at a time, no answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec import Struct
from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import FinishReason as VllmFinishReason

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.core import VllmCore, VllmEngine, make_request
from omni_actors.engine.models.thinkers import ENCODED, EmitRows
from omni_actors.engine.rows import check_finite, to_host
from omni_actors.engine.workers.base import attachment_of
from omni_actors.errors import EngineError, InvalidRequest
from omni_actors.protocol.messages import FinishReason
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import (
    EngineEvent,
    EngineFacts,
    FinishedEvent,
    StageInputs,
    StageRequest,
    StreamEvent,
)

RUNS = "_runs"  # suffix: the tensor of a sequence's states has that of the lengths of its runs, i32 [runs], beside it


@dataclass(frozen=True)
class EncoderSequence:
    """Tokens to encode.

    Args:
        token_ids: the whole sequence.
        features: the media in it, as vLLM takes them.
        runs: begin and end of the runs of positions whose states the next stage gets, one after the other, and with
            their lengths; None for all positions.
    """

    token_ids: Sequence[int]
    features: Sequence[MultiModalFeatureSpec] = ()
    runs: Sequence[tuple[int, int]] | None = None

    def tensors(self, name: str, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the next stage gets of the states [tokens, width]."""
        if self.runs is None:
            return {name: states}
        lengths = torch.tensor([end - begin for begin, end in self.runs], dtype=torch.int32)
        return {name: torch.cat([states[begin:end] for begin, end in self.runs]), name + RUNS: lengths}


class EncoderAdapter(ABC):
    """The model-specific part: what sequences a request is made of.

    Args:
        arguments: of the stage.
        config: vLLM's configuration for them.
    """

    def __init__(self, arguments: OmniEngineArgs, config: VllmConfig) -> None:
        self.arguments = arguments
        self.config = config

    @property
    @abstractmethod
    def facts(self) -> EngineFacts:
        """What the coordinator learns when the stage is ready."""

    def events(
        self, request_id: str, sequences: Mapping[str, EncoderSequence], tensors: Mapping[str, torch.Tensor]
    ) -> list[EngineEvent]:
        """What a request gives with the states of its sequences: they go to the next stage."""
        hosted = {name: to_host(states) for name, states in tensors.items()}
        return [StreamEvent(request_id, tensors=hosted, final=True)]

    @abstractmethod
    def sequences(self, request: StageRequest, inputs: StageInputs) -> Mapping[str, EncoderSequence]:
        """What to encode, by the name that its states get. Raises `OmniError`; keeps no state."""


class _Encoding(Struct):
    """A request; `waiting` are the sequences that the core still has, `parts` the states of each so far."""

    request: StageRequest
    sequences: Mapping[str, EncoderSequence]
    tokens: int
    waiting: set[int]
    parts: dict[int, list[torch.Tensor]] = {}


class EncoderEngine(VllmEngine[_Encoding]):
    """Runs the prefill of a language model and gives the states [tokens, width] that its ModelState taps.

    A sequence is a request of vLLM that ends after its first token, which is dropped: so vLLM batches the sequences of
    all requests, and cuts long ones into chunks.

    Raises:
        ConfigError, StartupError: see `OmniEngineArgs.create_engine_config` and `VllmCore`.
    """

    def __init__(self, arguments: OmniEngineArgs) -> None:
        config = arguments.create_engine_config()
        self.adapter: EncoderAdapter = arguments.adapter_class(EncoderAdapter)(arguments, config)
        super().__init__(VllmCore(config))

    @property
    def facts(self) -> EngineFacts:
        """What the coordinator learns when the stage is ready."""
        return self.adapter.facts

    def warm_up(self) -> None:
        """Encode a sequence. Raises `EngineError` if that fails, as it then would for every request."""
        self._add(StageRequest("_warm_up", StageParams(), seed=0), {"warm_up": EncoderSequence([0] * 24)})
        self._run_warm_up()
        self.core.forget_warm_up()

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        """Have the adapter check the request, and give its sequences to vLLM."""
        self._check_new(request.request_id)
        if not inputs.complete:
            raise InvalidRequest("This stage takes its input as a whole.")
        self._add(request, self.adapter.sequences(request, inputs))

    def _add(self, request: StageRequest, sequences: Mapping[str, EncoderSequence]) -> None:
        parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args={"omni": EmitRows()})
        prepared = [
            self.core.prepare(
                make_request(
                    f"{request.request_id}/{index}",
                    sequence.token_ids,
                    parameters,
                    priority=request.priority,
                    mm_features=list(sequence.features) or None,
                )
            )
            for index, sequence in enumerate(sequences.values())
        ]
        for each in prepared:  # once nothing can be refused any more
            self.core.add(each)
        tokens = sum(len(sequence.token_ids) for sequence in sequences.values())
        self._requests[request.request_id] = _Encoding(request, sequences, tokens, set(range(len(prepared))))

    def abort(self, request_id: str) -> None:
        """Drop a request with all its sequences. Unknown ids are ignored."""
        running = self._requests.pop(request_id, None)
        if running is not None and running.waiting:
            self.core.abort([f"{request_id}/{index}" for index in running.waiting])

    def _take(self, request_id: str, running: _Encoding, output: EngineCoreOutput) -> list[EngineEvent]:
        """The states of a request once all of its sequences are encoded."""
        index = int(output.request_id.rpartition("/")[2])
        if output.finish_reason in (VllmFinishReason.ERROR, VllmFinishReason.ABORT):
            running.waiting.discard(index)
            raise EngineError(f"vLLM ended the request: {output.finish_reason}.")
        encoded: torch.Tensor | None = attachment_of(output).get(ENCODED)
        if encoded is not None:
            running.parts.setdefault(index, []).append(encoded)
        if output.finish_reason is None:
            return []
        running.waiting.discard(index)
        if running.waiting:
            return []
        tensors: dict[str, torch.Tensor] = {}
        for place, (name, sequence) in enumerate(running.sequences.items()):
            tensors |= sequence.tensors(name, torch.cat(running.parts.get(place, [])))
        for name, states in tensors.items():
            check_finite(states, name)
        events = self.adapter.events(request_id, running.sequences, tensors)
        media = [feature for one in running.sequences.values() for feature in one.features]
        shown = sum(feature.mm_position.length for feature in media if feature.modality == "image")
        done = FinishedEvent(request_id, FinishReason.STOP, running.tokens, 0, picture_tokens=shown)
        return [*events, self._finished(done)]
