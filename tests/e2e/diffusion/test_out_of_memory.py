"""The device runs out of memory within a step: typed errors for its requests, nothing leaks, the engine goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import EngineLost, StageInputs, StageRequest
from tests.support.code2wav import CHUNKS, assert_out_of_memory, difference, out_of_memory
from tests.support.speech import Spec, Speech

pytestmark = pytest.mark.e2e

DECODE = CHUNKS
SPEC: Spec = (60, "Chelsie", 0.5, 3)
NAMES = ("a", "b", "c")


def raised_if(condition: Callable[..., bool], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: out_of_memory() if condition(*given) else original(*given)


def speak(engine: DiffusionEngine, *names: str) -> Speech:
    speech = Speech(engine)
    for name in names:
        speech.start(name, SPEC)
    for _ in range(500):
        for name in list(speech.waiting):
            if name in speech.errors:
                del speech.waiting[name]
            else:
                speech.feed(name, 9)
        if not speech.waiting and not engine.runnable():
            return speech
        speech.step()
    pytest.fail("the engine does not become idle")


def test_a_request_without_room_fails_alone(engine, monkeypatch):
    """Batches have no room either, and are computed one by one."""
    want = speak(engine, "a")
    runner = engine.core.worker.model_runner
    step, alone = runner.step, [""]

    def remembering(job_ids: Sequence[str]) -> Any:  # the vocoder does not know its requests
        alone[0] = job_ids[0].partition("/")[0] if len(job_ids) == 1 else ""
        return step(job_ids)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "step", remembering)
        patch.setattr(runner, "integrate", raised_if(lambda job_ids: len(job_ids) > 1, runner.integrate))
        patch.setattr(runner, "vocode", raised_if(lambda mel: alone[0] == "b", runner.vocode))
        speech = speak(engine, *NAMES)
    assert list(speech.errors) == ["b"]
    assert_out_of_memory(speech.errors["b"].error)
    for name in ("a", "c"):
        assert difference(speech.wave(name), want.wave("a")) <= 1e-5
    after = speak(engine, *NAMES)
    assert not after.errors
    for name in NAMES:
        assert difference(after.wave(name), want.wave("a")) <= 1e-5


def test_a_lost_device_ends_the_engine(vocoders, monkeypatch):
    """Unlike a lack of memory: after such an error every later call fails, so only a new process can continue."""
    engine = vocoders(False, CHUNKS, max_num_seqs=3)

    def lost(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.core.worker.model_runner, "integrate", lost)
    for name in NAMES:
        engine.start(StageRequest(name, StageParams(num_steps=2), 0), StageInputs(token_ids=[1] * 12))
    with pytest.raises(EngineLost, match="illegal memory access"):
        engine.step()
