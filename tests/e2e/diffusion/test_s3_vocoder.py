"""The vocoder of S3 tokens in a real EngineCore, compared with its weights' package: streams, voices, refusals."""

from __future__ import annotations

import shutil
from collections import defaultdict

import numpy as np
import pytest
import soundfile
import torch
from transformers import WhisperFeatureExtractor

from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.engine.models.s3_vocoder import flow, hift
from omni_actors.engine.models.s3_vocoder.flow import Flow, FlowChunk, voice_of
from omni_actors.engine.models.s3_vocoder.runner import S3Runner
from omni_actors.engine.models.s3_vocoder.voices import VoiceEncoder, mel_frames, token_features
from omni_actors.engine.models.s3_vocoder.weights import Weights
from omni_actors.engine.rows import to_torch
from omni_actors.errors import InvalidPayload, InvalidRequest, StartupError, UnknownVoice
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import AudioEvent, FinishedEvent, StageInputs, StageRequest
from omni_actors.telemetry import metrics as table
from tests.support.code2wav import WHOLE, arguments, difference, run_dry, sound_of
from tests.support.s3_reference import S3Reference, cut, growing
from tools.checkpoints.s3 import TINY, VOICES

pytestmark = pytest.mark.e2e

TOLERANCE = (
    1e-3  # of the peak: rounding of the frames changes the pitch, and that adds up in the phase of the oscillator
)


@pytest.fixture(scope="module")
def running(tiny_minicpm_o):
    engine = DiffusionEngine(arguments(tiny_minicpm_o, asynchronous=True, decode={"policy": "chunks"}))
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(running):
    yield running
    run_dry(running)
    assert set(running.counts().values()) == {0}, running.counts()


@pytest.fixture(scope="module")
def reference(tiny_minicpm_o):
    return S3Reference(tiny_minicpm_o / "assets" / "token2wav", TINY)


@pytest.fixture(scope="module")
def voices(tiny_minicpm_o):
    folder = tiny_minicpm_o / "assets"
    encoder = VoiceEncoder(folder / "token2wav")
    return {name: encoder(*soundfile.read(folder / f"{name}.wav", dtype="float32")) for name in VOICES}


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(TINY["tokens"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(name: str, voice: str | None = None) -> StageRequest:
    return StageRequest(name, StageParams(), 0, voice)


def drain(engine: DiffusionEngine) -> dict[str, torch.Tensor]:
    """The sound of each request, all of which must finish."""
    pieces: dict[str, list[torch.Tensor]] = defaultdict(list)
    while engine.runnable():
        for event in engine.step():
            assert isinstance(event, AudioEvent | FinishedEvent), event
            if isinstance(event, AudioEvent):
                pieces[event.request_id].append(to_torch(event.samples))
    return {name: torch.cat(sound) for name, sound in pieces.items()}


def assert_equal(sound: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 0.02
    assert difference(sound.numpy(), expected.numpy()) < TOLERANCE


def test_utterances_of_any_length_and_voice_in_one_batch_equal_the_reference(engine, reference, voices):
    given = {
        "long": (123, "alto"),
        "tail": (53, "bass"),
        "exact": (28, None),
        "short": (7, "bass"),
        "other": (103, "bass"),
    }
    for seed, (name, (count, voice)) in enumerate(given.items()):
        engine.start(request(name, voice), StageInputs(token_ids=tokens(count, seed)))
    sounds = drain(engine)
    for seed, (name, (count, voice)) in enumerate(given.items()):
        assert len(sounds[name]) == 960 * count
        assert_equal(sounds[name], reference.stream(growing(tokens(count, seed)), voices[voice or "alto"]))


@pytest.mark.nightly
def test_a_batch_in_memory_for_a_larger_one_and_longer_voices_sounds_the_same(
    tiny_minicpm_o, reference, voices, monkeypatch
):
    """As it is computed with CUDA graphs: all of it in memory that there is, with what others left there."""
    engine = DiffusionEngine(arguments(tiny_minicpm_o, decode={"policy": "chunks"}, max_num_seqs=5))
    runner = engine.core.worker.model_runner
    runner.batches.capture(runner.policy.first, runner.cutting.lengths())
    with monkeypatch.context() as patch:
        for module, name in ((flow, "Encoding"), (flow, "Intervals"), (hift, "HiftWindows")):
            patch.delattr(module, name)
        given = {"1": (60, "alto"), "2": (61, "alto"), "3": (78, "bass"), "4": (47, "bass"), "5": (10, "alto")}
        for names in (["3", "4", "5"], ["1", "2", "3"]):
            for name in names:
                count, voice = given[name]
                engine.start(request(name, voice), StageInputs(token_ids=tokens(count, int(name))))
            sounds = drain(engine)
            for name in names:
                count, voice = given[name]
                assert_equal(sounds[name], reference.stream(growing(tokens(count, int(name))), voices[voice]))
    engine.shutdown()


def test_tokens_that_come_by_and_by_while_others_join_make_the_same_sound(engine, reference, voices):
    given = tokens(131)
    pieces: list[torch.Tensor] = []
    engine.start(request("slow", "bass"), StageInputs(token_ids=given[:2], complete=False))
    for begin in range(2, len(given), 12):
        part = given[begin : begin + 12]
        engine.extend("slow", token_ids=part, complete=begin + 12 >= len(given))
        if begin == 26:
            engine.start(request("other"), StageInputs(token_ids=tokens(40, 1)))
        pieces += [drained for name, drained in drain(engine).items() if name == "slow"]
    assert_equal(torch.cat(pieces), reference.stream(growing(given), voices["bass"]))


@pytest.mark.parametrize(("first", "ends"), [(6, [6, 12, 24, 48, 73]), (25, [25, 50, 75])])
def test_other_first_chunks_equal_the_reference_with_these(tiny_minicpm_o, reference, voices, first, ends):
    given = tokens(90)
    sound = sound_of(tiny_minicpm_o, given, {}, "bass", decode={"policy": "chunks", "first_blocks": first})
    assert_equal(sound, reference.stream(cut(given, ends), voices["bass"]))


def test_a_whole_utterance_equals_the_reference(tiny_minicpm_o, reference, voices):
    given = tokens(70)
    assert_equal(sound_of(tiny_minicpm_o, given, {}, "bass", decode=WHOLE), reference.whole(given, voices["bass"]))


def test_half_precision_keeps_the_frames_within_45_decibels(tiny_minicpm_o, voices):
    """As on GPUs. Of its sound that cannot be said: the smallest change of a pitch adds up in the phase."""
    frames = []
    for dtype in (torch.float32, S3Runner.half):
        network = Flow(Weights.read(tiny_minicpm_o / "assets" / "token2wav" / "flow.pt"), 0)
        network.prepare(torch.device("cpu"), dtype)
        voice, state = voices["bass"], network.begun
        mels: list[torch.Tensor] = []
        embedding, prompt = voice_of(network.speaker, voice.embedding), len(voice.mel)
        with torch.inference_mode():
            for given, mel in ((voice.tokens, voice.mel), (tokens(28), None), (tokens(28, 1), None)):
                read = torch.cat([torch.as_tensor(given), torch.as_tensor(given)[: network.encoder.look_ahead]])
                chunk = FlowChunk(read, len(read), embedding, prompt, state, mel)
                made, (state,) = network([chunk], last=False)
                mels += made
        frames.append(torch.cat(mels[1:]))
    error = frames[1] - frames[0]
    assert 10 * torch.log10(frames[0].square().mean() / error.square().mean()) > 45


def test_a_recording_is_heard_as_the_reference_hears_it(reference):
    samples = np.random.default_rng(0).normal(size=30_000).astype(np.float32) * 0.1
    assert torch.allclose(mel_frames(torch.from_numpy(samples)), reference.mel(samples), atol=1e-4)
    heard = WhisperFeatureExtractor(feature_size=128)(samples, sampling_rate=16_000, padding=False)
    np.testing.assert_allclose(token_features(samples), heard.input_features[0], atol=1e-4)


def test_a_recording_that_is_no_voice_is_refused(tiny_minicpm_o):
    encoder = VoiceEncoder(tiny_minicpm_o / "assets" / "token2wav")
    with pytest.raises(InvalidRequest, match=r"0\.5 to 30 s; this one has 0\.25 s"):
        encoder(np.zeros(4000, np.float32), 16_000)


def test_voices_and_tokens_that_there_are_not_are_refused(engine):
    with pytest.raises(UnknownVoice, match="no voice 'tenor'; the voices are alto, bass"):
        engine.start(request("r", "tenor"), StageInputs(token_ids=tokens(5)))
    with pytest.raises(InvalidPayload, match="Code 60"):
        engine.start(request("r"), StageInputs(token_ids=[60]))


def test_the_budget_counts_what_an_utterance_keeps(engine):
    engine.start(request("r"), StageInputs(token_ids=tokens(60), complete=False))
    drain(engine)
    assert engine.statistics()[table.BUDGET_HELD] >= engine.counts()["allocated_bytes"] > 0
    engine.abort("r")


@pytest.mark.parametrize(
    ("broken", "decode", "error", "message"),
    [
        ("flow.pt", {}, StartupError, "Cannot read .*flow.pt"),
        ("campplus.onnx", {}, StartupError, "There is no .*campplus.onnx"),
        ("../alto.wav", {}, StartupError, "Cannot read the voice .*alto.wav"),
        ("", {"first_blocks": 1}, StartupError, "needs at least 2"),
        ("", {"look_ahead_blocks": 1}, StartupError, "knows its look-ahead"),
    ],
)
def test_what_cannot_speak_is_refused_at_the_start(tiny_minicpm_o, tmp_path, broken, decode, error, message):
    folder = shutil.copytree(tiny_minicpm_o, tmp_path / "broken")
    if broken:
        path = folder / "assets" / "token2wav" / broken
        path.unlink() if broken.endswith("onnx") else path.write_bytes(b"nothing")
    with pytest.raises(error, match=message):
        DiffusionEngine(arguments(folder, decode={"policy": "chunks", **decode}))
