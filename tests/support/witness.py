"""A stage that says what it was given: prompt embeddings, additional information, and what the stage before it sent."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from omni_actors.config import PipelineConfig, StageConfig
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.messages import FinishReason
from omni_actors.protocol.payloads import PROMPT_EMBEDS
from omni_actors.stage.engine_interface import (
    EngineEvent,
    EngineFacts,
    FinishedEvent,
    StageEngine,
    StageInputs,
    StageRequest,
    StreamEvent,
    TextEvent,
)
from omni_actors.stage.processors import Action, InputPiece, Passthrough, Start

ENVIRONMENT = {"OMNI_ACTORS_ALLOW_IMPORTS": "tests.support"}
WIDTH = 4
PIPELINE: dict[str, Any] = {
    "name": "witness",
    "model": "none",
    "stages": [
        {
            "name": "source",
            "kind": "custom",
            "engine_class": "tests.support.witness.Witness",
            "engine": {"wants": ["both", "first"]},
        },
        {"name": "between", "kind": "echo", "inputs": {"from": "source"}},
        {
            "name": "sink",
            "kind": "custom",
            "engine_class": "tests.support.witness.Witness",
            "engine": {"wants": ["both", "speed", "names", "table"]},
            "inputs": {"from": ["source", "between"], "processor": "tests.support.witness.Attentive"},
            "outputs": ["text"],
        },
    ],
}


class Attentive(Passthrough):
    """Wants a name of its own, and tells its engine what it found under it."""

    wants_information: ClassVar[tuple[str, ...]] = ("processor",)

    def feed(self, source: str, piece: InputPiece) -> list[Action]:
        actions = super().feed(source, piece)
        for action in actions:
            if isinstance(action, Start):
                scalars = {**action.inputs.scalars, "in the processor": told(self.information)}
                inputs = action.inputs
                return [Start(StageInputs(inputs.token_ids, inputs.tensors, scalars, lists=inputs.lists))]
        return actions


class Witness(StageEngine):
    """Answers with one text, or, as the entry stage, passes on what it got in all forms that chunks have.

    A request whose information has `pause` in it waits for so many seconds, one step each tenth of a second.
    """

    def __init__(self, pipeline: PipelineConfig, stage: StageConfig) -> None:
        self._wants = (*stage.engine["wants"], f"pause {stage.name}")
        self._pause = f"pause {stage.name}"
        self._requests: dict[str, tuple[float, StageRequest, StageInputs]] = {}

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(embeds_width=WIDTH, wants_information=self._wants)

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        pause = request.information.get(self._pause, 0.0)
        self._requests[request.request_id] = (time.monotonic() + float(pause), request, inputs)  # type: ignore[arg-type]

    def extend(
        self, request_id: str, rows: HostTensor | None = None, *, token_ids: Sequence[int] = (), complete: bool
    ) -> None:
        """Its input comes as a whole."""

    def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def runnable(self) -> bool:
        return bool(self._requests)

    def step(self) -> Sequence[EngineEvent]:
        events: list[EngineEvent] = []
        now = time.monotonic()
        for request_id, (due, request, inputs) in list(self._requests.items()):
            if due > now:
                continue
            del self._requests[request_id]
            events += self._testify(request, inputs)
        if not events:
            time.sleep(0.01)
        return events

    def _testify(self, request: StageRequest, inputs: StageInputs) -> list[EngineEvent]:
        request_id = request.request_id
        end = FinishedEvent(request_id, FinishReason.STOP, 1, 1)
        if inputs.prompt is None:
            text = json.dumps({"information": told_values(request.information), "inputs": told_inputs(inputs)})
            return [TextEvent(request_id, text, [1]), end]
        tensors = {name: inputs.tensors[name] for name in inputs.tensors if name == PROMPT_EMBEDS}
        scalars = {"in the source": told(request.information)}
        lists = {"of the source": ["a", 1, 2.5, True]}
        return [StreamEvent(request_id, [7], tensors, scalars, final=True, lists=lists), end]

    def counts(self) -> dict[str, int]:
        return {"requests": len(self._requests)}

    def shutdown(self) -> None:
        self._requests.clear()


def told_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them; a tensor by dtype, shape and a digest of its data."""
    return {
        name: [value.dtype.value, list(value.shape), hashlib.sha256(value.data).hexdigest()]
        if isinstance(value, HostTensor)
        else value
        for name, value in sorted(values.items())
    }


def told_inputs(inputs: StageInputs) -> dict[str, Any]:
    return told_values({**inputs.scalars, **inputs.lists, **inputs.tensors})


def told(values: Mapping[str, Any]) -> str:
    return json.dumps(told_values(values))
