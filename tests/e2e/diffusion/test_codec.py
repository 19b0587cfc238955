"""Qwen3-Omni's code2wav in a real EngineCore, compared with transformers: streams that join and leave, refusals."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.engine.rows import to_torch
from omni_actors.errors import StartupError
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import AudioEvent, ErrorEvent, FinishedEvent, StageInputs, StageRequest
from omni_actors.telemetry import metrics as table
from tests.support.code2wav import arguments, run_dry
from tests.support.codec import checkpoint_decoder, codes, flat, whole

pytestmark = pytest.mark.e2e

TOLERANCE = 2e-5  # at a peak of about 0.5
CHUNKS: dict[str, Any] = {"policy": "chunks"}


@pytest.fixture(scope="module")
def running(tiny_qwen3_checkpoint):
    engine = DiffusionEngine(arguments(tiny_qwen3_checkpoint, asynchronous=True, decode=CHUNKS))
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(running):
    yield running
    run_dry(running)
    assert set(running.counts().values()) == {0}, running.counts()


@pytest.fixture(scope="module")
def reference(tiny_qwen3_checkpoint):
    return checkpoint_decoder(tiny_qwen3_checkpoint)


@dataclass
class Answers:
    """The pieces of sound of each request, and which have finished."""

    pieces: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    finished: list[FinishedEvent] = field(default_factory=list)
    errors: list[ErrorEvent] = field(default_factory=list)

    def step(self, engine: DiffusionEngine) -> None:
        for event in engine.step() if engine.runnable() else ():
            if isinstance(event, AudioEvent):
                assert event.sample_rate == 24_000
                self.pieces[event.request_id].append(to_torch(event.samples))
            elif isinstance(event, FinishedEvent):
                self.finished.append(event)
            else:
                assert isinstance(event, ErrorEvent)
                self.errors.append(event)

    def sound(self, name: str) -> torch.Tensor:
        return torch.cat(self.pieces[name])


def request(name: str, **params: Any) -> StageRequest:
    return StageRequest(name, StageParams(**params), seed=0)


def drain(engine: DiffusionEngine, answers: Answers) -> Answers:
    for _ in range(500):
        if not engine.runnable():
            return answers
        answers.step(engine)
    pytest.fail("the engine does not become idle")


def test_streams_of_any_cuts_that_join_and_leave_equal_the_whole_decode(engine, reference):
    lengths, cuts, joins = (37, 3, 20, 1, 26), (1, 2, 5, 1, 26), (0, 0, 3, 6, 9)
    given = [codes(length, seed) for seed, length in enumerate(lengths)]
    sent = [0] * len(lengths)
    answers = Answers()
    for turn in range(60):
        for index, (length, cut) in enumerate(zip(lengths, cuts, strict=True)):
            if turn < joins[index] or sent[index] >= length:
                continue
            piece = flat(given[index][:, sent[index] : sent[index] + cut])
            complete = sent[index] + cut >= length
            if sent[index] == 0:
                engine.start(request(f"r{index}"), StageInputs(token_ids=piece, complete=complete))
            else:
                engine.extend(f"r{index}", token_ids=piece, complete=complete)
            sent[index] += cut
        answers.step(engine)
    drain(engine, answers)
    assert sorted(event.request_id for event in answers.finished) == ["r0", "r1", "r2", "r3", "r4"]
    assert {event.request_id: event.input_tokens for event in answers.finished}["r0"] == 37 * 16
    for index, frames in enumerate(given):
        want = whole(frames, reference)
        assert 0.1 < want.abs().max() < 0.95
        made = answers.sound(f"r{index}")
        assert made.shape == want.shape
        assert torch.allclose(made, want, atol=TOLERANCE, rtol=0)


def test_sound_begins_with_the_first_frame_and_an_end_alone_closes_it(engine, reference):
    frames = codes(4)
    engine.start(request("r"), StageInputs(token_ids=flat(frames[:, :1]), complete=False))
    answers = drain(engine, Answers())
    assert [len(piece) for piece in answers.pieces["r"]] == [1920 - 555]
    engine.extend("r", token_ids=flat(frames[:, 1:]), complete=False)
    drain(engine, answers)
    assert [len(piece) for piece in answers.pieces["r"]] == [1365, 1920, 3840]
    assert not answers.finished
    assert engine.counts()["carried"] == 1
    engine.extend("r", complete=True)
    drain(engine, answers)
    assert [event.request_id for event in answers.finished] == ["r"]
    assert torch.allclose(answers.sound("r"), whole(frames, reference), atol=TOLERANCE, rtol=0)


def test_the_budget_counts_what_an_utterance_keeps(engine):
    engine.start(request("r"), StageInputs(token_ids=flat(codes(2)), complete=False))
    drain(engine, Answers())
    assert engine.statistics()[table.BUDGET_HELD] == engine.counts()["allocated_bytes"] > 0
    engine.abort("r")


def test_a_failing_request_ends_alone(engine, reference, monkeypatch):
    decoder = engine.core.worker.model_runner.batches.decoder
    original = decoder.forward

    def forward(batch: torch.Tensor, *args: Any) -> Any:
        if (batch == 77).any():
            raise RuntimeError("out of luck")
        return original(batch, *args)

    monkeypatch.setattr(decoder, "forward", forward)
    engine.start(request("good"), StageInputs(token_ids=flat(codes(9))))
    engine.start(request("bad"), StageInputs(token_ids=flat(codes(9).index_fill(1, torch.tensor([5]), 77))))
    answers = drain(engine, Answers())
    (error,) = answers.errors
    assert error.request_id == "bad"
    assert "out of luck" in error.error.message
    assert torch.allclose(answers.sound("good"), whole(codes(9), reference), atol=TOLERANCE, rtol=0)


def damage(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["code2wav.decoder.6.conv.bias"]
    tensors["code2wav.code_embedding.weight"] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors")


def silence(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"enable_audio_output": False}))


@pytest.mark.parametrize(
    ("change", "decode", "text"),
    [
        (None, {"look_ahead_blocks": 1}, "look_ahead_blocks"),
        (None, {"solver": "euler"}, "no flow to solve"),
        (damage, {}, r"(?s)decoder\.6\.conv\.bias.*of another shape.*code_embedding"),
        (silence, {}, "(?s)no speech parts.*Leave the talker and code2wav stages out"),
    ],
)
def test_what_cannot_be_decoded_with_is_refused_at_the_start(tiny_qwen3_checkpoint, tmp_path, change, decode, text):
    folder = tiny_qwen3_checkpoint
    if change is not None:
        folder = shutil.copytree(folder, tmp_path / "checkpoint")
        change(folder)
    with pytest.raises(StartupError, match=text):
        DiffusionEngine(arguments(folder, decode=decode))
