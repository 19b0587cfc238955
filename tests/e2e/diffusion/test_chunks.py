"""The vocoder decoding in chunks while tokens come, in a real EngineCore, compared with whole utterances."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omni_actors.errors import InvalidPayload, InvalidRequest, PromptTooLong
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import AudioEvent, StageInputs, StageRequest
from tests.support.code2wav import CHUNKS, WHOLE, codec_tokens, difference
from tests.support.speech import STEPS, Spec, Speech

pytestmark = pytest.mark.e2e

DECODE = CHUNKS
SAMPLES = 480  # per codec token
BLOCK = 12  # codec tokens
LENGTHS = (1, 12, 13, 25, 70)
# Against the whole decode, of the peak and in decibel; measured 3.1e-3, 2.4e-4 and 0.002 (docs/benchmarks.md).
PEAK_ERROR, RMS_ERROR, SPECTRAL_DISTANCE = 0.01, 0.001, 0.02


@pytest.fixture
def whole_engine(vocoders):
    return vocoders(True, WHOLE)


def whole(engine, spec):
    count, voice, guidance, seed = spec
    request = StageRequest("w", StageParams(num_steps=STEPS, guidance_scale=guidance), seed, voice)
    engine.start(request, StageInputs(token_ids=codec_tokens(count, seed)))
    waves = []
    while engine.runnable():
        waves += [np.frombuffer(e.samples.data, np.float32) for e in engine.step() if isinstance(e, AudioEvent)]
    assert len(waves) == 1
    return waves[0]


def spectral_distance(wave, other):
    def spectrum(samples):
        window = torch.hann_window(256)
        return torch.stft(torch.from_numpy(samples.copy()), 256, 64, window=window, return_complex=True).abs()

    first, second = spectrum(wave), spectrum(other)
    floor = second.max() * 1e-4
    return float((20 * torch.log10(first.clamp(min=floor) / second.clamp(min=floor))).square().mean(0).sqrt().mean())


def test_every_length_is_whole_and_close_to_the_whole_decode(engine, whole_engine):
    speech = Speech(engine)
    specs: dict[str, Spec] = {f"r{n}": (n, ("Chelsie", "Ethan")[n % 2], 0.5 if n % 3 else 0.0, n) for n in LENGTHS}
    for name, spec in specs.items():
        speech.start(name, spec)
    speech.run()
    assert not speech.errors
    for name, spec in specs.items():
        wave, want = speech.wave(name), whole(whole_engine, spec)
        assert len(wave) == spec[0] * SAMPLES == len(want), "no token may be lost"
        assert speech.finished[name].input_tokens == spec[0]
        assert difference(wave, want) <= (PEAK_ERROR if spec[0] > BLOCK else 1e-5), spec  # one chunk is the whole
        assert np.sqrt(np.mean((wave - want) ** 2) / np.mean(want**2)) <= RMS_ERROR, spec
        assert spectral_distance(wave, want) <= SPECTRAL_DISTANCE, spec
        edges = np.cumsum([len(chunk) for chunk in speech.heard[name]])[:-1]
        steps = np.abs(np.diff(want))
        for edge in edges:
            assert abs(wave[edge] - wave[edge - 1]) <= steps[max(0, edge - 400) : edge + 400].max() * 1.1, "a click"
    assert len(speech.heard["r70"]) >= 3


def test_the_waveform_does_not_depend_on_when_tokens_come_or_who_else_speaks(engine):
    spec: Spec = (75, "Chelsie", 0.5, 5)
    waves: list[np.ndarray] = []
    chunks: list[list[int]] = []
    for per_step, others in ((1, 0), (7, 3), (75, 0)):
        speech = Speech(engine)
        for index in range(others):
            speech.start(f"other{index}", (20 + 13 * index, "Ethan", 0.5, index))
        speech.start("r", spec)
        speech.run(per_step)
        waves.append(speech.wave("r"))
        chunks.append([len(chunk) for chunk in speech.heard["r"]])
    assert chunks == [chunks[0]] * len(chunks)
    for wave in waves[1:]:
        assert difference(wave, waves[0]) <= 1e-5


def test_sound_comes_before_the_last_token(engine):
    speech = Speech(engine)
    speech.start("r", (100, "Chelsie", 0.5, 1))
    for _ in range(2 * BLOCK - 1):
        if speech.given["r"] < 2 * BLOCK - 1:
            speech.feed("r", 1)
        speech.step()
    assert not speech.heard["r"]
    assert not engine.runnable(), "without its look-ahead the first chunk is not begun"
    assert engine.waits_for_input("r")
    speech.feed("r", 1)
    assert not engine.waits_for_input("r")
    while engine.runnable():
        speech.step()
    assert speech.when["r"] == [2 * BLOCK]
    speech.run(12)
    assert len(speech.wave("r")) == 100 * SAMPLES


def test_abort_in_the_middle_frees_everything_and_harms_no_other(engine, whole_engine):
    speech = Speech(engine)
    for name in ("stays", "goes"):
        speech.start(name, (80, "Chelsie", 0.5, 2))
    while not speech.heard["goes"]:
        for name in list(speech.waiting):
            speech.feed(name, 4)
        speech.step()
    engine.abort("goes")
    engine.abort("goes")
    heard = len(speech.heard["goes"])
    engine.extend("goes", token_ids=[1, 2], complete=True)  # of a talker that has not heard of it yet
    speech.waiting.pop("goes", None)
    speech.run()
    assert len(speech.heard["goes"]) == heard
    assert "goes" not in speech.finished
    assert difference(speech.wave("stays"), whole(whole_engine, (80, "Chelsie", 0.5, 2))) <= PEAK_ERROR


def test_bad_later_tokens_end_the_request(engine):
    for tokens, error in (([3, 10**6], InvalidPayload), ([-1], InvalidPayload), ([1] * 20_000, PromptTooLong)):
        engine.start(StageRequest("r", StageParams(), 0), StageInputs(token_ids=[1] * 30, complete=False))
        engine.step()
        with pytest.raises(error):
            engine.extend("r", token_ids=tokens, complete=False)
        assert engine.counts()["requests"] == 0
    with pytest.raises(InvalidRequest, match="no frame"):
        engine.start(StageRequest("r", StageParams(), 0), StageInputs())
    engine.start(StageRequest("r", StageParams(), 0), StageInputs(complete=False))
    with pytest.raises(InvalidRequest, match="no frame"):
        engine.extend("r", complete=True)


@pytest.mark.nightly
def test_a_cheaper_solver_stays_close_and_chunks_as_well(vocoders, whole_engine):
    spec: Spec = (61, "Chelsie", 0.5, 3)
    speech = Speech(vocoders(True, {**CHUNKS, "solver": "midpoint"}))
    speech.start("cheap", spec)
    speech.run()
    own = whole(vocoders(True, {**WHOLE, "solver": "midpoint"}), spec)
    assert difference(speech.wave("cheap"), own) <= PEAK_ERROR, "its own chunks make its own whole decode"
    assert 0 < spectral_distance(speech.wave("cheap"), whole(whole_engine, spec)) <= 2.0
