"""Qwen3-TTS's code2wav in a real EngineCore, and what a clip is encoded to, compared with Qwen's package."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.engine.models.qwen3_tts.clip_encoder import KEPT, ClipEncoder, clip_frames
from omni_actors.engine.rows import to_torch
from omni_actors.errors import InvalidPayload, StartupError
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import AudioEvent, StageInputs, StageRequest
from tests.support.code2wav import arguments
from tests.support.qwen3_tts_reference import Qwen3TtsReference

pytestmark = pytest.mark.e2e

TOLERANCE = 2e-5  # at a peak of about 0.5
CLIP = (0.1 * np.random.default_rng(2).standard_normal(29_000)).astype(np.float32)


@pytest.fixture(scope="module")
def reference(tiny_qwen3_tts_kinds):
    return Qwen3TtsReference(tiny_qwen3_tts_kinds["base"])


@pytest.fixture(scope="module")
def engine(tiny_qwen3_tts_kinds):
    folder = tiny_qwen3_tts_kinds["base"]
    engine = DiffusionEngine(arguments(folder, asynchronous=True, decode={"policy": "chunks", "smooth_start": False}))
    yield engine
    assert set(engine.counts().values()) == {0}
    engine.shutdown()


def decoded(engine: DiffusionEngine, requests: Sequence[tuple[torch.Tensor, int, int]]) -> list[torch.Tensor]:
    """The sound of requests that run at a time.

    Args:
        requests: codes [F, 16] of each, how many of them come at a time, and how many are not to be heard.
    """
    sounds: dict[str, list[torch.Tensor]] = {f"r{index}": [] for index in range(len(requests))}
    sent = [0] * len(requests)
    for _ in range(300):
        for index, (codes, cut, unheard) in enumerate(requests):
            if sent[index] < len(codes):
                piece = codes[sent[index] : sent[index] + cut].flatten().tolist()
                complete = sent[index] + cut >= len(codes)
                if sent[index]:
                    engine.extend(f"r{index}", token_ids=piece, complete=complete)
                else:
                    inputs = StageInputs(piece, scalars={"unheard": 16 * unheard}, complete=complete)
                    engine.start(StageRequest(f"r{index}", StageParams(), seed=0), inputs)
                sent[index] += cut
        for event in engine.step() if engine.runnable() else ():
            if isinstance(event, AudioEvent):
                sounds[event.request_id].append(to_torch(event.samples))
    return [torch.cat(pieces) for pieces in sounds.values()]


def test_sound_in_chunks_equals_that_of_the_reference_also_after_a_clip(engine, reference):
    own = reference.speak("The tide is full.", frames=14, ref_audio=(CLIP, 24_000), x_vector_only_mode=True)
    continued = reference.speak("The tide is full.", frames=9, ref_audio=(CLIP, 24_000), ref_text="One.")
    clip = reference.encode(CLIP, 24_000)[1]
    joined = torch.cat([clip, continued.codes])
    made = decoded(engine, [(own.codes, 1, 0), (joined, 5, len(clip)), (joined, len(joined), len(clip))])
    for sound, wanted in zip(made, (own.waveform, continued.waveform, continued.waveform), strict=True):
        # The reference rounds where it cuts the clip off: it may keep a sample of it.
        wanted = wanted[-len(sound) :]
        assert len(sound) % 1920 == 0
        assert len(sound) == len(wanted)
        assert wanted.abs().max() > 0.1
        assert (sound - wanted).abs().max() <= TOLERANCE
    assert (len(made[0]), len(made[1])) == (14 * 1920, 9 * 1920)


def test_codes_of_half_a_frame_cannot_be_left_out(engine):
    inputs = StageInputs([0] * 32, scalars={"unheard": 8})
    with pytest.raises(InvalidPayload, match="whole frames"):
        engine.start(StageRequest("r", StageParams(), seed=0), inputs)


@pytest.fixture(scope="module")
def encoder(tiny_qwen3_tts_kinds):
    folder = tiny_qwen3_tts_kinds["base"]
    config = json.loads((folder / "config.json").read_text())["speaker_encoder_config"]
    return ClipEncoder(str(folder), config, 16, dummy=False)


@pytest.mark.parametrize("samples", [29_000, 12_001, 30_720])
def test_a_clip_has_the_voice_and_the_codes_of_the_reference(reference, encoder, samples):
    clip = (0.1 * np.random.default_rng(samples).standard_normal(samples)).astype(np.float32)
    voice, codes = encoder(clip, 24_000)
    wanted_voice, wanted_codes = reference.encode(clip, 24_000)
    assert codes.equal(wanted_codes)
    assert len(codes) == clip_frames(samples, 24_000, 1920)
    assert (voice - wanted_voice).abs().max() <= 1e-5 * wanted_voice.abs().max()


def test_clips_of_any_rate_become_as_many_frames_as_are_announced_and_the_latest_are_kept(encoder):
    for samples, rate in ((22_051, 44_100), (8_000, 16_000), (7_777, 11_025)):
        clip = (0.3 * np.sin(2 * np.pi * 220 / rate * np.arange(samples))).astype(np.float32)
        assert len(encoder(clip, rate).codes) == clip_frames(samples, rate, 1920)
    first = encoder(CLIP[:12_000], 24_000)
    assert encoder(CLIP[:12_000].copy(), 24_000) is first
    for length in range(2_000, 2_000 + KEPT):
        encoder(CLIP[:length], 24_000)
    assert encoder(CLIP[:12_000], 24_000) is not first


def test_a_codec_of_another_kind_is_refused_at_the_start(tiny_qwen3_tts_kinds, tmp_path):
    folder = shutil.copytree(tiny_qwen3_tts_kinds["base"], tmp_path / "other")
    path = folder / "speech_tokenizer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "qwen3_tts_tokenizer_25hz"}))
    with pytest.raises(StartupError, match="12Hz"):
        DiffusionEngine(arguments(folder, asynchronous=False))
