"""The speaking checkpoint in the repository, and the judge of what it says."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile

from tests.support.paths import REPOSITORY
from tools.speaker.codec import PHONES, SOUNDS, Sound
from tools.speaker.judge import Judge

pytestmark = pytest.mark.nightly

# What is said in docs/audio/boat.wav: phones, and how many codes each lasts.
BOAT = (
    "pau:3 dh:3 ax:2 ch:8 ih:3 l:5 d:3 r:2 ax:2 n:3 f:5 aw:8 n:4 d:2 ax:2 s:6 m:1 ao:4 l:3 b:4 ow:4 "
    "t:3 n:3 ih:2 r:5 dh:2 ax:2 r:5 ih:1 v:3 er:11 pau:6"
)


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
