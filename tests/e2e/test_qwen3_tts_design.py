"""Qwen3-TTS VoiceDesign as users run it: a voice that is described, over HTTP, as Qwen's package speaks with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest

from tests.support.qwen3_tts_reference import Qwen3TtsReference
from tests.support.servers import HttpPipeline, close_clients

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

TEXT = "The tide is full."
FRAMES, FRAME = 12, 1920
TOLERANCE = 1e-3  # another code in one of the 16 codebooks of one frame changes the sound by far more


@pytest.fixture(scope="module")
def http(tiny_qwen3_tts_kinds: dict[str, Path]) -> Iterator[HttpPipeline]:
    with HttpPipeline("stage_configs/tiny_qwen3_tts.yaml", {"model": tiny_qwen3_tts_kinds["voice_design"]}) as running:
        yield running


def ask(http: HttpPipeline, **fields: Any) -> httpx.Response:
    params = {"talker": {"max_tokens": FRAMES + 1, "temperature": 0.0}}
    body = {"input": TEXT, "response_format": "pcm", "stage_params": params, **fields}
    return httpx.post(f"{http.url}/v1/audio/speech", json=body, timeout=60)


def test_described_voices_sound_as_the_reference_speaks_with_them(
    http: HttpPipeline, tiny_qwen3_tts_kinds: dict[str, Path]
) -> None:
    reference = Qwen3TtsReference(tiny_qwen3_tts_kinds["voice_design"])
    heard = []
    for instructions, fields in (("A low, calm voice.", {}), ("A child who laughs.", {"language": "french"})):
        answer = ask(http, instructions=instructions, **fields)
        assert answer.status_code == 200, answer.text
        heard.append(numpy.frombuffer(answer.content, "<i2") / 32767.0)
        wanted = reference.speak(TEXT, frames=FRAMES, instruct=instructions, **fields).waveform.numpy()
        assert heard[-1].shape == wanted.shape == (FRAMES * FRAME,)
        assert numpy.abs(wanted).max() > 0.05, "a silent reference proves nothing"
        numpy.testing.assert_allclose(heard[-1], wanted.clip(-1, 1), atol=TOLERANCE)
    assert numpy.abs(heard[0] - heard[1]).max() > 0.05, "the description matters"
    assert httpx.get(f"{http.url}/v1/audio/voices", timeout=30).json()["voices"] == []
    for given, field, code in (
        ({}, "instructions", "missing_required_parameter"),
        ({"instructions": "A child.", "voice": "vivian"}, "voice", "unknown_voice"),
    ):
        refused = ask(http, **given)
        assert refused.status_code == 400
        assert refused.json()["error"].items() >= {"param": field, "code": code}.items()
    close_clients()
    http.assert_idle()
