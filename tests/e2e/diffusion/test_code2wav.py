"""The vocoder stage in a real EngineCore, compared with transformers: batches of mixed requests, failures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.engine.models.diffusers_layout import read_tensors
from omni_actors.errors import (
    InvalidPayload,
    InvalidRequest,
    ModelOutputInvalid,
    PromptTooLong,
    StartupError,
    UnknownVoice,
)
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import AudioEvent, ErrorEvent, FinishedEvent, StageInputs, StageRequest
from tests.support.code2wav import WHOLE, codec_tokens, difference, expected

pytestmark = pytest.mark.e2e

DECODE = WHOLE
TOLERANCE = 1e-4  # of the waveform's peak, against transformers
BATCH_TOLERANCE = 5e-6  # of the peak, against the same request alone: float rounding

# tokens, points in time, voice, guidance: lengths on and off block borders (12 tokens are 24 frames, one block).
MIX = [
    (7, 10, "Chelsie", 0.5),
    (12, 5, "Ethan", 0.5),
    (40, 10, "Ethan", 1.5),
    (25, 3, "Chelsie", 0.0),
    (1, 2, "Chelsie", 0.5),
    (90, 10, "Chelsie", 0.5),
    (7, 1, "Ethan", 0.5),
    (24, 8, "Ethan", 0.5),
]


@pytest.fixture
def batches(engine, monkeypatch):
    """The requests of every step of the model."""
    runner = engine.core.worker.model_runner
    original, seen = runner.step, []

    def step(request_ids: Sequence[str]) -> Any:
        seen.append(tuple(job_id.rpartition("/")[0] for job_id in request_ids))
        return original(request_ids)

    monkeypatch.setattr(runner, "step", step)
    return seen


def start(engine: DiffusionEngine, name: str, spec: tuple[int, int, str, float], seed: int = 0) -> None:
    tokens, points, voice, guidance = spec
    params = StageParams(num_steps=points, guidance_scale=guidance)
    engine.start(StageRequest(name, params, seed, voice), StageInputs(token_ids=codec_tokens(tokens, seed)))


def drain(engine: DiffusionEngine, at_step: dict[int, Any] | None = None) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Run until idle: waveforms by request, and all other events. `at_step` calls a function before that step."""
    waveforms, others = {}, []
    for number in range(500):
        if at_step and number in at_step:
            at_step.pop(number)()
        elif not engine.runnable():
            break
        for event in engine.step():
            if isinstance(event, AudioEvent):
                assert event.request_id not in waveforms
                assert event.sample_rate == 24_000
                waveforms[event.request_id] = np.frombuffer(event.samples.data, np.float32)
            else:
                others.append(event)
    else:
        pytest.fail("the engine does not become idle")
    return waveforms, others


def test_mixed_batch_equals_transformers_and_each_request_alone(engine, reference, batches):
    def join() -> None:
        for index in range(5, len(MIX)):
            start(engine, f"r{index}", MIX[index], seed=index)

    for index in range(5):
        start(engine, f"r{index}", MIX[index], seed=index)
    together, others = drain(engine, at_step={2: join})
    assert [type(event) for event in others] == [FinishedEvent] * len(MIX)
    assert sorted(together) == sorted(f"r{index}" for index in range(len(MIX)))
    assert max(map(len, batches)) >= 6, "requests that join late must share steps with earlier ones"
    assert {len(batch) for batch in batches} != {1}
    for index, spec in enumerate(MIX):
        want = expected(reference, spec, index)
        assert 0.05 < np.abs(want).max() < 0.95
        assert difference(together[f"r{index}"], want) <= TOLERANCE, spec
        start(engine, "alone", spec, seed=index)
        assert difference(drain(engine)[0]["alone"], together[f"r{index}"]) <= BATCH_TOLERANCE, spec


def test_a_request_takes_one_step_per_interval(engine, batches):
    start(engine, "two-points", (5, 2, "Ethan", 0.5))
    start(engine, "one-point", (5, 1, "Ethan", 0.5))
    _, others = drain(engine)
    assert batches == [("two-points", "one-point")]
    assert [event.output_tokens for event in others] == [1, 1]
    assert [event.input_tokens for event in others] == [5, 5]
    start(engine, "ten", (5, 10, "Ethan", 0.5))
    drain(engine)
    assert len(batches) == 1 + 9


def test_seed_and_voice_decide_the_waveform(engine):
    waveforms = []
    for voice, seed in (("Chelsie", 1), ("Chelsie", 1), ("Chelsie", 2), ("Ethan", 1)):
        request = StageRequest("r", StageParams(num_steps=3), seed, voice)
        engine.start(request, StageInputs(token_ids=codec_tokens(10, 0)))
        waveforms.append(drain(engine)[0]["r"])
    assert np.array_equal(waveforms[0], waveforms[1])
    assert difference(waveforms[2], waveforms[0]) > 0.05
    assert difference(waveforms[3], waveforms[0]) > 0.01
    # The seed among the parameters wins, and the first voice is the default.
    engine.start(StageRequest("r", StageParams(num_steps=3, seed=1), 77), StageInputs(token_ids=codec_tokens(10, 0)))
    assert np.array_equal(drain(engine)[0]["r"], waveforms[0])


def test_failing_allocation_and_bad_waveform_are_errors_of_the_request(engine, monkeypatch):
    runner = engine.core.worker.model_runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "add", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        start(engine, "r", MIX[0])
        _, (event,) = drain(engine)
        assert "MemoryError: no room" in str(event.error)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "vocode", lambda mel: mel[:, 0] * float("nan"))
        start(engine, "r", MIX[0])
        _, (event,) = drain(engine)
        assert isinstance(event, ErrorEvent)
        assert isinstance(event.error, ModelOutputInvalid)
        assert "NaN" in event.error.message


@pytest.mark.parametrize(
    ("token_ids", "fields", "error", "text"),
    [
        ([], {}, InvalidRequest, "no frame"),
        ([3, 10**6], {}, InvalidPayload, "1000000"),
        ([3, -1], {}, InvalidPayload, "-1"),
        ([1] * 20_000, {}, PromptTooLong, "20000"),
        ([1], {"voice": "Nobody"}, UnknownVoice, "Chelsie, Ethan"),
        ([1], {"params": StageParams(num_steps=0)}, InvalidRequest, "1..1000"),
        ([1], {"params": StageParams(num_steps=1001)}, InvalidRequest, "1..1000"),
        ([1], {"params": StageParams(guidance_scale=-1.0)}, InvalidRequest, "guidance_scale"),
        ([1], {"params": StageParams(sway_coefficient=float("nan"))}, InvalidRequest, "sway_coefficient"),
        ([1], {"params": StageParams(max_tokens=4)}, InvalidRequest, "max_tokens"),
    ],
)
def test_bad_input_is_refused_without_a_trace(engine, token_ids, fields, error, text):
    request = StageRequest("r", fields.get("params", StageParams()), 0, fields.get("voice"))
    with pytest.raises(error, match=text):
        engine.start(request, StageInputs(token_ids=token_ids))
    assert engine.counts()["requests"] == 0
    assert not engine.runnable()


def test_ids_in_use_and_input_that_contradicts_itself(engine):
    request = StageRequest("r", StageParams(num_steps=2), 0)
    engine.start(request, StageInputs(token_ids=[1], complete=False))
    with pytest.raises(InvalidRequest, match="already running"):
        engine.start(request, StageInputs(token_ids=[1]))
    engine.extend("r", complete=True)
    engine.extend("r", complete=True)  # a late, empty end is harmless
    assert list(drain(engine)[0]) == ["r"]
    engine.extend("r", token_ids=[1], complete=True)  # so is input of a request that has ended
    for more, text in (
        ({"token_ids": [1], "complete": True}, "after the last"),
        ({"complete": False}, "after the last"),
        ({"rows": HostTensor(DType.F32, (0, 1), b""), "complete": True}, "not rows"),
    ):
        engine.start(request, StageInputs(token_ids=[1]))
        with pytest.raises(InvalidRequest, match=text):
            engine.extend("r", **more)
        assert engine.counts()["requests"] == 0


def test_bf16_moves_sound_but_not_far(vocoders, reference):
    spec = (25, 4, "Ethan", 0.5)
    engine = vocoders(True, WHOLE | {"precision": "bf16"})
    start(engine, "r", spec, seed=3)
    want = expected(reference, spec, 3)
    assert 1e-4 < float(np.sqrt(np.mean((drain(engine)[0]["r"] - want) ** 2) / np.mean(want**2))) < 0.1


def test_only_the_vocoders_shards_are_read(tiny_checkpoint, tmp_path):
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    vocoder = {name: tensor for name, tensor in tensors.items() if name.startswith("token2wav.")}
    save_file(vocoder, tmp_path / "model-00002.safetensors")
    (tmp_path / "model-00001.safetensors").write_bytes(b"not to be opened")
    files = {name: "model-00002" if name in vocoder else "model-00001" for name in tensors}
    index = {"weight_map": {name: f"{file}.safetensors" for name, file in files.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    read = dict(read_tensors(str(tmp_path), "token2wav."))
    assert read.keys() == {name.removeprefix("token2wav.") for name in vocoder}
    with pytest.raises(StartupError, match="no tensor"):
        dict(read_tensors(str(tmp_path), "vocoder."))
    (tmp_path / "model-00002.safetensors").unlink()
    with pytest.raises(StartupError, match="model-00002"):
        dict(read_tensors(str(tmp_path), "token2wav."))
