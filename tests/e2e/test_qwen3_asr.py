"""The tiny Qwen3-ASR behind its HTTP server: recordings become text, in every format, whole and in parts."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile

from tests.support.servers import HttpPipeline

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

RATE = 16_000
FORM = "language (English|German)<asr_text>[a-z]{3}( [a-z]{4}){2}\\."  # a toy with random weights is told what to write
WRITTEN = r"^[a-z]{3}( [a-z]{4}){2}\.$"
RANDOM = np.random.default_rng(0)


def noise(seconds: float) -> np.ndarray:
    return (RANDOM.standard_normal(round(seconds * RATE)) * 0.1).astype(np.float32)


def file_of(samples: np.ndarray, format: str = "FLAC") -> bytes:
    sink = io.BytesIO()
    soundfile.write(sink, samples, RATE, format=format)
    return sink.getvalue()


SHORT = file_of(noise(1.5))


@pytest.fixture(scope="module")
def pipeline(tiny_qwen3_asr: Path) -> Iterator[HttpPipeline]:
    """Its parts are 15.5 s long, as its context is short."""
    overrides = {
        "model": tiny_qwen3_asr,
        "stages.thinker.engine.max_model_len": 512,
        "stages.thinker.sampling.max_tokens": 60,
        "stages.thinker.sampling.structured_outputs": json.dumps({"regex": FORM}),
    }
    with HttpPipeline("stage_configs/tiny_qwen3_asr.yaml", overrides) as running:
        yield running
        running.assert_idle()


def test_each_format_has_the_text_alone_and_the_language_that_was_heard(pipeline: HttpPipeline) -> None:
    client = pipeline.openai().audio.transcriptions
    ask = {"model": "tiny-qwen3-asr", "file": ("a.flac", SHORT)}
    text = client.create(**ask).text
    assert text.endswith(".")
    assert "<" not in text
    assert client.create(**ask, response_format="text") == f"{text}\n"
    assert client.create(**ask, response_format="srt") == f"1\n00:00:00,000 --> 00:00:01,500\n{text}\n"
    assert client.create(**ask, response_format="vtt") == f"WEBVTT\n\n00:00:00.000 --> 00:00:01.500\n{text}\n"
    told = client.create(**ask, response_format="verbose_json")
    assert told.language in ("english", "german")
    assert (told.text, told.duration) == (text, 1.5)
    assert [(segment.start, segment.end, segment.text) for segment in told.segments] == [(0.0, 1.5, text)]
