"""Qwen3-TTS over HTTP: the sound that the client library gets, whole and streamed, and what is refused."""

from __future__ import annotations

from typing import Any

import httpx
import numpy
import pytest

from omni_actors.client import OmniClient, spoken
from tests.support.servers import HttpPipeline, close_clients

pytestmark = pytest.mark.e2e

TEXT = "The tide is full."
SHORT = {"talker": {"max_tokens": 9, "temperature": 0.0}}
SAMPLES = 8 * 1920


def test_the_text_that_is_given_is_spoken_from_the_first_frame_on(qwen3_tts_http: HttpPipeline) -> None:
    """In several pieces, which together are the sound that the client library gets."""
    with OmniClient(qwen3_tts_http.endpoint) as client:
        prompt = spoken(TEXT, language="english", instructions="Softly.")
        wanted = client.generate(prompt, voice="ryan", params=SHORT, timeout=120).audio
    assert wanted.shape == (SAMPLES,)
    assert numpy.abs(wanted).max() > 0.05
    with qwen3_tts_http.openai().audio.speech.with_streaming_response.create(
        model="tiny-qwen3-tts",
        input=TEXT,
        voice="Ryan",
        instructions="Softly.",
        response_format="pcm",
        extra_body={"language": "English", "stage_params": SHORT},
    ) as response:
        pieces = list(response.iter_bytes())
    close_clients()
    sound = numpy.frombuffer(b"".join(pieces), "<i2") / 32767.0
    assert len(pieces) > 1, "it streams"
    numpy.testing.assert_allclose(sound, wanted.clip(-1, 1), atol=1e-4)
    qwen3_tts_http.assert_idle()


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"voice": "alice"}, "voice", "unknown_voice"),
        ({"language": "Klingon"}, "language", "invalid_value"),
        ({"input": " "}, "input", "invalid_request"),
        ({"input": "tide " * 800, "instructions": "slow " * 800}, "input", "prompt_too_long"),
    ],
)
def test_what_is_refused_names_the_field(
    qwen3_tts_http: HttpPipeline, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = httpx.post(f"{qwen3_tts_http.url}/v1/audio/speech", json={"input": TEXT, **fields}, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"].items() >= {"param": param, "code": code}.items()
