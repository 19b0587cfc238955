"""The tools that make the speaking checkpoint: codec, teacher's records, judge, export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from tests.support.paths import REPOSITORY
from tools.speaker import SpeakerError
from tools.speaker.codec import PHONES, SOUNDS, Sound
from tools.speaker.export import MAX_BYTES, expected_shapes, whole_model
from tools.speaker.judge import Judge
from tools.speaker.layout import load_tokenizer
from tools.speaker.parts import read_part, read_voices, write_part

pytestmark = pytest.mark.nightly

CHECKPOINT = REPOSITORY / "examples" / "speaker"
# What is said in docs/audio/boat.wav: phones, and how many codes each lasts.
BOAT = (
    "pau:3 dh:3 ax:2 ch:8 ih:3 l:5 d:3 r:2 ax:2 n:3 f:5 aw:8 n:4 d:2 ax:2 s:5 m:2 ao:4 l:3 b:3 ow:5 "
    "t:3 n:2 ih:3 r:4 dh:2 ax:2 r:5 ih:1 v:3 er:11 pau:6"
)


def test_the_checkpoint_is_whole_and_small() -> None:
    """Every tensor that its configuration asks for, finite, in less than 20 MB."""
    tokenizer = load_tokenizer(CHECKPOINT)
    tensors = whole_model(CHECKPOINT, tokenizer.convert_tokens_to_ids("user"))
    assert sum(value.numel() for value in tensors.values()) == 9_048_800
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < MAX_BYTES
    voices = read_voices(CHECKPOINT)
    assert list(voices) == ["Chelsie", "Ethan"]
    assert {field: value.shape[-1] for field, value in voices["Ethan"].items()} == {"cond": 192, "ref_mel": 80}
    assert tokenizer("<|im_end|>")["input_ids"] == [1002]


def test_parts_that_do_not_fit_are_refused_by_the_name_of_a_tensor(tmp_path: Path) -> None:
    parts = {part: read_part(CHECKPOINT, part) for part in ("thinker", "talker", "dit", "vocoder")}
    for part, tensors in parts.items():
        write_part(tmp_path, part, tensors, read_voices(CHECKPOINT) if part == "dit" else {})
    assert set(whole_model(tmp_path, 296)) == set(expected_shapes(296))
    assert torch.equal(read_voices(tmp_path)["Chelsie"]["cond"], read_voices(CHECKPOINT)["Chelsie"]["cond"])
    broken = dict(parts["talker"])
    broken["codec_head.weight"] = broken["codec_head.weight"] * float("nan")
    write_part(tmp_path, "talker", broken, {})
    with pytest.raises(SpeakerError, match=r"NaN.*talker\.codec_head\.weight"):
        whole_model(tmp_path, 296)
    del broken["codec_head.weight"]
    write_part(tmp_path, "talker", broken, {})
    with pytest.raises(SpeakerError, match=r"1 tensors .*talker\.codec_head\.weight"):
        whole_model(tmp_path, 296)
    (tmp_path / "talker.safetensors").unlink()
    with pytest.raises(SpeakerError, match="no weights of the talker"):
        whole_model(tmp_path, 296)


def test_the_judge_tells_phones_from_what_is_broken() -> None:
    """A recording of the checkpoint's voice in the documentation, and the phones that are said in it."""
    wave, rate = soundfile.read(REPOSITORY / "docs" / "audio" / "boat.wav", dtype="float32")
    assert rate == 24_000
    spans = [span.split(":") for span in BOAT.split()]
    codes = [
        1 + SOUNDS.index(Sound(PHONES.index(phone), 0, False, 0)) for phone, count in spans for _ in range(int(count))
    ]
    judge = Judge.load()
    assert judge.wrong_frames(wave, codes) < 0.5
    late = np.roll(wave, 2400)
    noise = np.random.default_rng(0).normal(0, 0.1, len(wave)).astype(np.float32)
    for broken in (0 * wave, wave[::-1], late, noise):
        assert judge.wrong_frames(broken, codes) > 0.8
    with pytest.raises(ValueError, match="frames"):
        judge.wrong_frames(wave[:-480], codes)
