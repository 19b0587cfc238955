"""Requests of the vocoder that get their codec tokens a few at a time, and what is heard of them."""

from __future__ import annotations

import numpy as np
import pytest

from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import (
    AudioEvent,
    EngineEvent,
    ErrorEvent,
    FinishedEvent,
    StageInputs,
    StageRequest,
)
from tests.support.code2wav import codec_tokens

STEPS = 4
Spec = tuple[int, str, float, int]  # tokens, voice, guidance, seed


class Speech:
    """Requests whose tokens come a few at a time, as a talker sends them, and what was heard of each."""

    def __init__(self, engine: DiffusionEngine) -> None:
        self.engine = engine
        self.waiting: dict[str, list[int]] = {}
        self.heard: dict[str, list[np.ndarray]] = {}
        self.when: dict[str, list[int]] = {}  # tokens given when a chunk was heard
        self.given: dict[str, int] = {}
        self.finished: dict[str, FinishedEvent] = {}
        self.errors: dict[str, ErrorEvent] = {}

    def start(self, name: str, spec: Spec, first: int = 1, priority: int = 0) -> None:
        count, voice, guidance, seed = spec
        tokens = codec_tokens(count, seed)
        request = StageRequest(name, StageParams(num_steps=STEPS, guidance_scale=guidance), seed, voice, priority)
        self.heard[name], self.when[name], self.given[name] = [], [], min(first, count)
        self.waiting[name] = tokens[first:]
        self.engine.start(request, StageInputs(token_ids=tokens[:first], complete=False))

    def feed(self, name: str, count: int) -> None:
        """More tokens; the end comes after the last of them, on its own, as the talker's does."""
        tokens, self.waiting[name] = self.waiting[name][:count], self.waiting[name][count:]
        self.given[name] += len(tokens)
        self.engine.extend(name, token_ids=tokens, complete=not tokens)
        if not tokens:
            del self.waiting[name]

    def step(self) -> None:
        for event in self.engine.step():
            self._hear(event)

    def _hear(self, event: EngineEvent) -> None:
        name = event.request_id
        if isinstance(event, AudioEvent):
            assert name not in self.finished
            self.heard[name].append(np.frombuffer(event.samples.data, np.float32))
            self.when[name].append(self.given[name])
        elif isinstance(event, FinishedEvent):
            self.finished[name] = event
        else:
            assert isinstance(event, ErrorEvent)
            self.errors[name] = event

    def feed_all(self, name: str) -> None:
        """All tokens that are left, and the end."""
        self.feed(name, len(self.waiting[name]))
        self.feed(name, 1)

    def run(self, per_step: int = 5) -> None:
        for _ in range(5000):
            for name in list(self.waiting):
                self.feed(name, per_step)
            if not self.waiting and not self.engine.runnable():
                return
            self.step()
        pytest.fail("the engine does not become idle")

    def wave(self, name: str) -> np.ndarray:
        return np.concatenate(self.heard[name])
