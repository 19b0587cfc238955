"""A stage after the vocoder that raises quiet speech to an even loudness while it streams.

In the repository:

    PYTHONPATH=examples OMNI_ACTORS_ALLOW_IMPORTS=custom_stage \
        python -m omni_actors.launch examples/custom_stage/echo.yaml --prompt "The tide is full." --save-audio level.wav
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy
from numpy.typing import NDArray

from omni_actors.config import PipelineConfig, StageConfig
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest, suggest
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.protocol.messages import SAMPLE_RATE, SAMPLES, FinishReason
from omni_actors.stage.engine_interface import (
    AudioEvent,
    EngineEvent,
    EngineFacts,
    FinishedEvent,
    StageEngine,
    StageInputs,
    StageRequest,
)
from omni_actors.stage.processors import Action, Extend, InputPiece, Skip, Start, StreamProcessor

# --8<-- [start:processor]


class SoundPieces(StreamProcessor):
    """Passes on the sound of the previous stage, piece by piece."""

    def __init__(self, start_after: int, sources: tuple[str, ...]) -> None:
        super().__init__(start_after, sources)
        self._started = False

    def feed(self, source: str, piece: InputPiece) -> list[Action]:
        samples = piece.tensors.get(SAMPLES)
        if self._started:
            return [Extend(samples, complete=piece.final)]
        if samples is None:
            return [Skip()] if piece.final else []
        self._started = True
        return [Start(StageInputs(tensors={SAMPLES: samples}, scalars=piece.scalars, complete=piece.final))]


# --8<-- [end:processor]
# --8<-- [start:options]


@dataclass(frozen=True)
class Options:
    """Options in the stage's `engine` mapping."""

    peak: float = 0.9  # loudness to reach; 1 is full scale
    most_gain: float = 20.0  # silence stays silence
    release: float = 0.7  # share of the loudest sample so far that a piece passes on to the next

    @classmethod
    def of(cls, stage: StageConfig) -> Options:
        for name, value in stage.engine.items():
            where = f"stages.{stage.name}.engine.{name}"
            if name not in cls.__dataclass_fields__:
                raise ConfigError(f"{where} is no option of the leveller.{suggest(name, cls.__dataclass_fields__)}")
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"{where} must be a number above 0, got {value!r}.")
        return cls(**stage.engine)


# --8<-- [end:options]
# --8<-- [start:engine]


@dataclass
class Speech:
    """One request: the pieces that wait to be computed, and how loud it has been."""

    rate: int
    peak: float
    waiting: list[NDArray[numpy.float32]] = field(default_factory=list)
    complete: bool = False
    loudest: float = 0.0
    gain: float = 0.0
    pieces: int = 0


class Leveller(StageEngine):
    """The engine. `engine_class` names it in the YAML; it receives the checked configuration."""

    def __init__(self, pipeline: PipelineConfig, stage: StageConfig) -> None:
        self._options = Options.of(stage)
        self._requests: dict[str, Speech] = {}

    @classmethod
    def check_options(cls, stage: StageConfig) -> bool:
        """Let `omni-actors check` find a wrong option."""
        Options.of(stage)
        return True

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(wants_information=("peak",))  # the vocoder has the voices and the sample rate

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        peak = request.information.get("peak", self._options.peak)  # the client's word goes before the YAML's
        if not isinstance(peak, int | float) or not 0 < peak <= 1:
            raise InvalidRequest(f"additional_information['peak'] must be a number above 0, at most 1; got {peak!r}.")
        speech = Speech(int(inputs.scalars[SAMPLE_RATE]), float(peak), complete=inputs.complete)
        speech.waiting.append(samples_of(inputs.tensors[SAMPLES]))
        self._requests[request.request_id] = speech

    def extend(
        self, request_id: str, rows: HostTensor | None = None, *, token_ids: Sequence[int] = (), complete: bool
    ) -> None:
        speech = self._requests[request_id]
        if rows is not None:
            speech.waiting.append(samples_of(rows))
        speech.complete = complete

    def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def runnable(self) -> bool:
        return any(speech.waiting or speech.complete for speech in self._requests.values())

    def step(self) -> Sequence[EngineEvent]:
        """Compute one piece of every request that has one."""
        events: list[EngineEvent] = []
        for request_id, speech in list(self._requests.items()):
            if speech.waiting:
                level = self._level(speech, speech.waiting.pop(0))
                samples = HostTensor(DType.F32, level.shape, level.tobytes())
                events.append(AudioEvent(request_id, samples, speech.rate))
            if speech.complete and not speech.waiting:
                del self._requests[request_id]
                events.append(FinishedEvent(request_id, FinishReason.STOP, speech.pieces, speech.pieces))
        return events

    def counts(self) -> dict[str, int]:
        return {"requests": len(self._requests)}

    def shutdown(self) -> None:
        self._requests.clear()

    def _level(self, speech: Speech, samples: NDArray[numpy.float32]) -> NDArray[numpy.float32]:
        """Raise the gain evenly over a piece, so that nothing clicks; lower it at once, so that nothing clips."""
        options = self._options
        loudest = float(numpy.abs(samples).max(initial=0.0))
        speech.loudest = max(options.release * speech.loudest, loudest)
        wanted = min(options.most_gain, speech.peak / max(speech.loudest, 1e-6))
        begin = min(speech.gain or wanted, wanted)
        gain = numpy.linspace(begin, wanted, len(samples), dtype=numpy.float32)
        speech.gain = wanted
        speech.pieces += 1
        return samples * gain


def samples_of(tensor: HostTensor) -> NDArray[numpy.float32]:
    """Check a tensor from another process and return its samples, f32 [samples]."""
    if tensor.dtype is not DType.F32 or len(tensor.shape) != 1:
        raise InvalidPayload(f"Sound must be f32 [samples], got {tensor.dtype} {list(tensor.shape)}.")
    return numpy.frombuffer(tensor.data, numpy.float32).copy()  # the memory belongs to the sender


# --8<-- [end:engine]
