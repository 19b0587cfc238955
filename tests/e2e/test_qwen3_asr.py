"""The tiny Qwen3-ASR behind its HTTP server: recordings become text, in every format, whole and in parts."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile

from omni_actors.http_server.recordings import SEARCH_SECONDS, quiet_cuts
from tests.support.servers import HttpPipeline

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

RATE = 16_000
FORM = "language (English|German)<asr_text>[a-z]{3}( [a-z]{4}){2}\\."  # a toy with random weights is told what to write
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


def post(pipeline: HttpPipeline, file: bytes = SHORT, route: str = "transcriptions", **fields: str) -> httpx.Response:
    return httpx.post(f"{pipeline.url}/v1/audio/{route}", files={"file": ("a", file)}, data=fields, timeout=120)


def test_a_long_recording_is_cut_where_it_is_quiet_and_its_parts_are_heard_as_each_is_alone(
    pipeline: HttpPipeline,
) -> None:
    samples = noise(50)
    for start in (18, 37):  # parts of at most 20.6 s, so that none is cut when it is sent alone
        samples[start * RATE : start * RATE + RATE // 2] *= 1e-3
    told = post(pipeline, file_of(samples), response_format="verbose_json").json()
    starts, ends = ([segment[name] for segment in told["segments"]] for name in ("start", "end"))
    assert starts == [0, *ends[:-1]]
    assert [18 < ends[0] < 18.5, 37 < ends[1] < 37.5, ends[2:]] == [True, True, [50]]
    assert told["duration"] == 50
    texts = [segment["text"] for segment in told["segments"]]
    assert told["text"] == " ".join(texts)
    samples, _ = soundfile.read(io.BytesIO(file_of(samples)), dtype="float32")  # as the server has them, in 16 bits
    places = [0, *quiet_cuts(samples, RATE, 512 / 20 - SEARCH_SECONDS), len(samples)]
    assert [round(place / RATE, 3) for place in places] == [0, *ends]
    for text, (first, last) in zip(texts, itertools.pairwise(places), strict=True):
        assert post(pipeline, file_of(samples[first:last])).json()["text"] == text

    subtitles = post(pipeline, file_of(samples), response_format="srt").text.split("\n\n")
    assert [cue.splitlines()[2] for cue in subtitles] == texts
    client = pipeline.openai().audio.transcriptions
    *deltas, done = client.create(model="tiny-qwen3-asr", file=("a.flac", file_of(samples)), stream=True)
    assert "".join(event.delta for event in deltas) == done.text == told["text"]
    assert len(deltas) > 3 * len(texts)


def test_a_file_that_does_not_say_its_length_is_measured(pipeline: HttpPipeline) -> None:
    endless = bytearray(SHORT)  # the header of a stream
    endless[21] &= 0xF0
    endless[22:26] = bytes(4)
    assert post(pipeline, bytes(endless), response_format="verbose_json").json()["duration"] == 1.5


def test_what_a_recording_is_about_and_its_language_reach_the_model(pipeline: HttpPipeline) -> None:
    plain = post(pipeline).json()["usage"]["input_tokens"]
    told = post(pipeline, prompt="Dr Zhivago").json()["usage"]["input_tokens"]
    assert told - plain == len("Dr Zhivago"), "a token for each letter"
    heard = post(pipeline, language="en", response_format="verbose_json").json()
    assert heard["language"] == "en"
    assert heard["text"].startswith("language "), "the model is past the place for it, and writes it as text"


@pytest.mark.parametrize(
    ("route", "fields", "param", "words"),
    [
        ("transcriptions", {"language": "xx"}, "language", "must be one of Chinese"),
        ("translations", {}, "model", "does not translate"),
    ],
)
def test_what_it_does_not_do_is_refused(
    pipeline: HttpPipeline, route: str, fields: dict[str, str], param: str, words: str
) -> None:
    answer = post(pipeline, route=route, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
