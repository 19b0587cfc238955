"""Qwen3-TTS as users run it: launcher, two processes, client. Sound is compared with Qwen's package."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy
import pytest

from omni_actors.client import AsyncOmniClient
from tests.support.qwen3_tts_reference import Qwen3TtsReference
from tests.support.servers import HttpPipeline

pytestmark = pytest.mark.e2e

TEXT = "The tide is full, and they are to be at one with it."
PEAK_TOLERANCE = 1e-3  # another code in one of the 16 codebooks of one frame changes the sound by far more


async def test_texts_at_once_sound_as_the_reference_speaks_each(
    qwen3_tts_http: HttpPipeline, tiny_qwen3_tts: Path
) -> None:
    """Whole chain, by sound that only the right codes of all 16 codebooks make."""
    asked: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
        ("vivian", 30, {"language": "english"}, {"language": "english"}),
        ("eric", 12, {}, {}),
        ("ryan", 21, {"instructions": "Softly."}, {"instruct": "Softly."}),
    ]
    async with AsyncOmniClient(qwen3_tts_http.endpoint) as client:
        description = await client.describe()
        assert description.speech is not None
        assert description.speech.instructions == "optional"
        assert (description.voices, description.sample_rate) == (("vivian", "ryan", "eric"), 24_000)
        outputs = await asyncio.gather(
            *(
                client.generate(
                    TEXT,
                    voice=voice,
                    additional_information=information,
                    params={"talker": {"max_tokens": frames + 1, "temperature": 0.0}},
                    timeout=120,
                )
                for voice, frames, information, _ in asked
            )
        )
    reference = Qwen3TtsReference(tiny_qwen3_tts)
    for (voice, frames, _, given), output in zip(asked, outputs, strict=True):
        wanted = reference.speak(TEXT, frames=frames, speaker=voice, **given).waveform.numpy()
        assert output.audio.shape == wanted.shape == (1920 * frames,)
        peak = float(numpy.abs(wanted).max())
        assert peak > 0.05, "a silent reference proves nothing"
        assert float(numpy.abs(output.audio - wanted).max()) <= PEAK_TOLERANCE * peak
        assert output.usage["code2wav"].first_output < output.usage["talker"].finished, "sound streams"
    qwen3_tts_http.assert_idle()
