"""CosyVoice 2's vocoder in a real EngineCore, compared with the package `minicpmo-utils`, which has its networks."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest
import soundfile
import torch

from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.engine.models.s3_vocoder.voices import RecordedVoice, VoiceEncoder
from omni_actors.engine.rows import to_torch
from omni_actors.errors import StartupError
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import AudioEvent, StageInputs, StageRequest
from tests.support.code2wav import WHOLE, arguments, difference, run_dry, sound_of
from tests.support.cosyvoice_reference import CosyVocoderReference, second_ends
from tests.support.drawn_sizes import DRAWS, s3_sizes
from tools.checkpoints.cosyvoice import write_tiny
from tools.checkpoints.s3 import TINY, VOICES

pytestmark = pytest.mark.e2e

TOLERANCE = 1e-3  # of the peak, as with the other S3 vocoder


@pytest.fixture(scope="module")
def reference(tiny_cosyvoice2: Path) -> CosyVocoderReference:
    return CosyVocoderReference(tiny_cosyvoice2, TINY)


@pytest.fixture(scope="module")
def voices(tiny_cosyvoice2: Path) -> dict[str, RecordedVoice]:
    encoder = VoiceEncoder(tiny_cosyvoice2, "speech_tokenizer_v2.onnx")
    folder = tiny_cosyvoice2 / "asset"
    return {name: encoder(*soundfile.read(folder / f"{name}.wav", dtype="float32")) for name in VOICES}


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(TINY["tokens"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_equal(sound: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 0.005, "a silent reference proves nothing"
    assert difference(sound.numpy(), expected.numpy()) < TOLERANCE


def test_a_whole_utterance_equals_the_reference(tiny_cosyvoice2, reference, voices):
    given = tokens(41)
    assert_equal(
        sound_of(tiny_cosyvoice2, given, {}, "bass", decode=WHOLE), reference.stream(given, [], voices["bass"])
    )


@pytest.mark.nightly
@DRAWS
def test_drawn_vocoders_sound_as_the_reference_does(draw: str, tmp_path: Path):
    generator = Random(f"s3 {draw}")
    sizes, seed = s3_sizes(generator), generator.randrange(1 << 31)
    print(f"seed {seed}, {sizes}")
    write_tiny(tmp_path, seed, vocoder=sizes)
    reference = CosyVocoderReference(tmp_path, sizes)
    voice = VoiceEncoder(tmp_path, "speech_tokenizer_v2.onnx")(
        *soundfile.read(tmp_path / "asset" / "alto.wav", dtype="float32")
    )
    given = tokens(generator.randrange(30, 90), seed)
    sound = sound_of(tmp_path, given, {}, "alto", decode={"policy": "chunks"})
    assert_equal(sound, reference.stream(given, second_ends(voice, 1, 2, 4), voice))


def test_utterances_that_come_by_and_by_in_one_batch_equal_the_reference(tiny_cosyvoice2, reference, voices):
    """Of unequal lengths and voices; the others join while the first is spoken."""
    engine = DiffusionEngine(arguments(tiny_cosyvoice2, asynchronous=True, decode={"policy": "chunks"}))
    given = {"long": (111, "alto"), "exact": (28, None), "short": (7, "bass"), "other": (60, "bass")}
    codes = {name: tokens(count, seed) for seed, (name, (count, _)) in enumerate(given.items())}
    pieces: dict[str, list[torch.Tensor]] = defaultdict(list)

    def start(name: str, given_now: list[int], *, complete: bool) -> None:
        request = StageRequest(name, StageParams(), 0, given[name][1])
        engine.start(request, StageInputs(token_ids=given_now, complete=complete))

    def drain() -> None:
        while engine.runnable():
            for event in engine.step():
                if isinstance(event, AudioEvent):
                    pieces[event.request_id].append(to_torch(event.samples))

    start("long", codes["long"][:2], complete=False)
    for begin in range(2, 111, 30):
        engine.extend("long", token_ids=codes["long"][begin : begin + 30], complete=begin + 30 >= 111)
        if begin == 32:
            for name in ("exact", "short", "other"):
                start(name, codes[name], complete=True)
        drain()
    run_dry(engine)
    assert set(engine.counts().values()) == {0}, engine.counts()
    engine.shutdown()
    assert len(pieces["long"]) == 3
    for name, (count, voice) in given.items():
        spoken = voices[voice or "alto"]
        sound = torch.cat(pieces[name])
        assert len(sound) == 960 * count
        assert_equal(sound, reference.stream(codes[name], second_ends(spoken, 1, 2, 4), spoken))


def test_chunks_that_are_too_short_to_overlap_are_refused(tiny_cosyvoice2):
    with pytest.raises(StartupError, match="first_blocks is 3; this decoder needs at least 4"):
        DiffusionEngine(arguments(tiny_cosyvoice2, decode={"policy": "chunks", "first_blocks": 3}))


def test_a_checkpoint_without_a_recording_says_where_to_put_one(tiny_cosyvoice2, tmp_path):
    shutil.copytree(tiny_cosyvoice2, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "asset")
    with pytest.raises(StartupError, match="no recording of a voice in") as refused:
        DiffusionEngine(arguments(tmp_path))
    assert "NAME.wav" in refused.value.hint
