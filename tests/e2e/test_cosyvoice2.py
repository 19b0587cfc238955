"""CosyVoice 2 as users run it, over HTTP; its speech is compared with transformers' Qwen2 and the vocoder's package."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from tests.support.code2wav import difference
from tests.support.cosyvoice_reference import CosyVocoderReference, CosyVoiceReference, second_ends
from tests.support.servers import HttpPipeline
from tools.checkpoints.cosyvoice import SPOKEN
from tools.checkpoints.s3 import TINY

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

TEXT = "you are with the tide, and it is on the other side"
CODES = 64  # at most, as the YAML says
INSTRUCTIONS = "as one of the"


def test_a_text_is_spoken_in_the_voice_of_a_recording_as_the_reference_speaks_it(tiny_cosyvoice2):
    """Continuing what is said in it, without knowing that, and as instructed."""
    talker, vocoder = CosyVoiceReference(tiny_cosyvoice2), CosyVocoderReference(tiny_cosyvoice2, TINY)
    sounds = talker.voice("bass").tokens.tolist()
    cases = [
        ({"voice": "bass"}, SPOKEN, sounds),
        ({"voice": "alto"}, "", []),
        ({"voice": "bass", "instructions": INSTRUCTIONS}, f"{INSTRUCTIONS}<|endofprompt|>", []),
    ]
    with HttpPipeline("stage_configs/tiny_cosyvoice2.yaml", {"model": tiny_cosyvoice2}) as running:
        assert httpx.get(f"{running.url}/v1/audio/voices", timeout=30).json()["voices"] == ["alto", "bass"]
        for fields, before, continued in cases:
            with running.openai().audio.speech.with_streaming_response.create(
                model="tiny-cosyvoice2", input=TEXT, response_format="pcm", **fields
            ) as response:
                pieces = list(response.iter_bytes())
            codes, voice = talker.speak(TEXT, before, continued)[:CODES], talker.voice(fields["voice"])
            wanted = vocoder.stream(codes, second_ends(voice, 1, 2, 4), voice).numpy()
            assert len(pieces) > 1, "it streams"
            assert difference(np.frombuffer(b"".join(pieces), "<i2") / np.float32(32767), wanted) < 2e-3
        drawn = []
        for seed in (1, 1, 2):
            stage = {"talker": {"temperature": 1.0, "max_tokens": 30}}
            body = {"input": TEXT, "response_format": "pcm", "seed": seed, "stage_params": stage}
            drawn.append(httpx.post(f"{running.url}/v1/audio/speech", json=body, timeout=60).content)
        assert drawn[0] == drawn[1] != drawn[2]
        running.assert_idle()
