"""The tiny Qwen3-ASR behind its HTTP server: recordings become text, in every format, whole and in parts."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from openai import AsyncOpenAI

from omni_actors.client import OmniClient
from omni_actors.http_server.realtime.formats import RATE as REALTIME_RATE
from omni_actors.http_server.transcriptions import SEARCH_SECONDS, quiet_cuts
from omni_actors.protocol.payloads import WordTime
from tests.support.paths import REPOSITORY
from tests.support.realtime import answer_on, until_event
from tests.support.servers import HttpPipeline
from tests.support.spoken import text_socket
from tests.support.waiting import PATIENCE, eventually

pytestmark = pytest.mark.e2e

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
def pipeline(tiny_qwen3_asr: Path, tiny_qwen3_aligner: Path) -> Iterator[HttpPipeline]:
    """Its parts are about 20 s long, as its context is short, and those whose words get times are about 6 s long."""
    overrides = {
        "model": tiny_qwen3_asr,
        "stages.aligner.model": tiny_qwen3_aligner,
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
    told = client.create(**ask, response_format="verbose_json")
    assert told.language in ("english", "german")
    assert (told.text, told.duration, told.words) == (text, 1.5, None)
    (segment,) = told.segments
    assert segment.text == text
    cue = f"{clock(segment.start)} --> {clock(segment.end)}\n{text}\n"
    assert client.create(**ask, response_format="srt") == f"1\n{cue}".replace(".", ",", 2)
    assert client.create(**ask, response_format="vtt") == f"WEBVTT\n\n{cue}"


def clock(seconds: float) -> str:
    return f"00:00:{seconds:06.3f}"


def post(pipeline: HttpPipeline, file: bytes = SHORT, route: str = "transcriptions", **fields: str) -> httpx.Response:
    return httpx.post(f"{pipeline.url}/v1/audio/{route}", files={"file": ("a", file)}, data=fields, timeout=120)


@pytest.mark.nightly
def test_a_long_recording_is_cut_where_it_is_quiet_and_its_parts_are_heard_as_each_is_alone(
    pipeline: HttpPipeline,
) -> None:
    samples = noise(50)
    for start in (18, 37):  # parts of at most 20.6 s, so that none is cut when it is sent alone
        samples[start * RATE : start * RATE + RATE // 2] *= 1e-3
    told = post(pipeline, file_of(samples)).json()
    samples, _ = soundfile.read(io.BytesIO(file_of(samples)), dtype="float32")  # as the server has them, in 16 bits
    cuts = quiet_cuts(samples, RATE, 512 / 20 - SEARCH_SECONDS)
    assert [18 < cuts[0] / RATE < 18.5, 37 < cuts[1] / RATE < 37.5, cuts[2:]] == [True, True, []]
    parts = [file_of(samples[first:last]) for first, last in itertools.pairwise([0, *cuts, len(samples)])]
    texts = [post(pipeline, part).json() for part in parts]
    assert told["text"] == " ".join(text["text"] for text in texts)
    for tokens in ("input_tokens", "output_tokens"):
        assert told["usage"][tokens] == sum(text["usage"][tokens] for text in texts)
    client = pipeline.openai().audio.transcriptions
    *deltas, done = client.create(model="tiny-qwen3-asr", file=("a.flac", file_of(samples)), stream=True)
    assert "".join(event.delta for event in deltas) == done.text == told["text"]
    assert len(deltas) > 3 * len(texts), "it comes as it is written"


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


def test_words_have_times_and_subtitles_are_cut_at_sentences(pipeline: HttpPipeline) -> None:
    """The aligner's classes reach for 16 s, so that parts are of 11 s."""
    recording = file_of(noise(14))
    told = post(
        pipeline, recording, response_format="verbose_json", **{"timestamp_granularities[]": ["word", "segment"]}
    ).json()
    words, segments = told["words"], told["segments"]
    assert [word["word"] for word in words] == told["text"].replace(".", "").split()
    assert len(words) == 6
    assert all(word["start"] <= word["end"] for word in words)
    second = words[3:]
    assert min(word["start"] for word in second) > 5, "they are those of the second part"
    for segment in segments:
        inside = [word for word in words if segment["start"] <= word["start"] and word["end"] <= segment["end"]]
        assert segment["text"].replace(".", "").split()[0] in [word["word"] for word in inside]
    assert " ".join(segment["text"] for segment in segments) == told["text"]
    assert all(segment["end"] - segment["start"] <= 16 for segment in segments)
    subtitles = post(pipeline, recording, response_format="srt").text.strip().split("\n\n")
    assert [cue.splitlines()[2] for cue in subtitles] == [segment["text"] for segment in segments]


def test_the_status_says_what_the_pipeline_hears(pipeline: HttpPipeline) -> None:
    status = httpx.get(f"{pipeline.url}/v1/status").json()
    assert (status["hearing"]["max_seconds"], status["aligning"]["max_seconds"]) == (25.6, 16)


def test_times_of_words_are_in_verbose_json_alone(pipeline: HttpPipeline) -> None:
    error = post(pipeline, response_format="srt", **{"timestamp_granularities[]": "word"}).json()["error"]
    assert (error["param"], error["code"]) == ("timestamp_granularities", "unsupported_value")


def test_the_words_of_a_given_text_get_times(pipeline: HttpPipeline) -> None:
    with OmniClient(pipeline.endpoint) as client:
        output = client.generate(
            [{"role": "user", "content": [{"type": "audio", "audio": (noise(2), RATE)}]}],
            modalities=["words"],
            additional_information={"transcript": "The tide -- is full."},
        )
    assert [(word.word, word.place) for word in output.words] == [("The", 0), ("tide", 4), ("is", 12), ("full", 15)]
    assert not output.text


@pytest.fixture(scope="module")
def cascade(pipeline: HttpPipeline, tiny_spoken_chat: Path) -> Iterator[HttpPipeline]:
    template = REPOSITORY / "stage_configs" / "qwen2_5_omni_tools.jinja"
    tools = ["--tool-call-parser", "hermes", "--tool-chat-template", str(template)]
    with HttpPipeline(tiny_spoken_chat, arguments=["--http-transcriber", pipeline.endpoint, *tools]) as running:
        yield running
        running.assert_idle()


def test_a_chat_model_is_spoken_to_and_spoken(pipeline: HttpPipeline, cascade: HttpPipeline) -> None:
    """The cascade: all turns are written down, and the answer is that to their texts, in text and in sound."""
    files = [file_of(noise(seconds)) for seconds in (1.5, 2.0)]
    texts = [post(pipeline, file).json()["text"] for file in files]
    assert texts[0] != texts[1]
    sounds = [{"data": base64.b64encode(file).decode(), "format": "flac"} for file in files]
    answers = []
    for first, second in (
        [[{"type": "input_audio", "input_audio": sound}] for sound in sounds],
        [[{"type": "text", "text": text}] for text in texts],
    ):
        answer = cascade.openai().chat.completions.create(
            model="spoken-chat",
            modalities=["text", "audio"],
            audio={"voice": "vivian", "format": "pcm16"},
            messages=[
                {"role": "user", "content": first},
                {"role": "assistant", "content": "It was blue."},
                {"role": "user", "content": second},
            ],
            seed=3,
            max_tokens=12,
            timeout=120,
        )
        answers.append((answer.choices[0].message.audio.transcript, answer.choices[0].message.audio.data))
        assert answer.usage.completion_tokens > 0
    assert answers[0] == answers[1]
    assert len(answers[0][1]) > 1000


@pytest.mark.nightly
def test_a_turn_that_is_spoken_calls_a_tool_whose_result_is_spoken(cascade: HttpPipeline) -> None:
    """A grammar has the model call, whatever it would say."""
    city = {"type": "object", "properties": {"city": {"enum": ["Kiel", "Ulm"]}}, "required": ["city"]}
    weather = {"name": "weather", "strict": True, "parameters": city | {"additionalProperties": False}}
    sound = {"data": base64.b64encode(SHORT).decode(), "format": "flac"}
    messages = [{"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]}]
    ask = {"model": "spoken-chat", "modalities": ["text", "audio"], "audio": {"voice": "vivian", "format": "pcm16"}}
    ask |= {"tools": [{"type": "function", "function": weather}], "temperature": 1.0, "seed": 1, "timeout": 120}
    create = cascade.openai().chat.completions.create
    choice = {"type": "function", "function": {"name": "weather"}}
    called = create(**ask, messages=messages, tool_choice=choice, max_tokens=200).choices[0].message
    (call,) = called.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Kiel", "Ulm")
    assert called.audio is None, "a call is not spoken"
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is raining."}
    messages += [{"role": "assistant", "tool_calls": [call.model_dump()]}, result]
    answer = create(**ask, messages=messages, tool_choice="none", max_tokens=12).choices[0].message
    assert answer.audio.transcript
    assert len(answer.audio.data) > 1000


def spoken_events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]


def times_of(pipeline: HttpPipeline, pcm: bytes, text: str) -> list[WordTime]:
    """When the aligner says that the words of a text are said, in i16 at `REALTIME_RATE`."""
    samples = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
    with OmniClient(pipeline.endpoint) as client:
        content = [{"type": "audio", "audio": (samples, REALTIME_RATE)}]
        told = {"transcript": text}
        found = client.generate(
            [{"role": "user", "content": content}], modalities=["words"], additional_information=told
        )
    return found.words


async def test_words_that_are_spoken_have_the_times_that_the_aligner_gives(pipeline: HttpPipeline) -> None:
    """Echo stages make 20 ms of sound of each letter."""
    speech = {"stages.talker.engine.speech": "{}", "stages.code2wav.engine.samples_per_token": 480}
    sentences = ["The tide is full. ", "The sea is calm."]
    with HttpPipeline(
        "stage_configs/echo_speech.yaml", speech, arguments=["--http-transcriber", pipeline.endpoint]
    ) as echo:
        async with text_socket(echo.url, "/v1/audio/speech/stream") as client:
            for text in sentences:
                await client.send({"type": "input_text.append", "text": text})
            await client.send({"type": "input_text.end"})
            told, seconds = [], 0.0
            while (event := await client.message())["type"] != "speech.audio.done":
                if event["type"] == "speech.audio.words":
                    told.append((event, seconds))
                    seconds = 0.0
                else:
                    seconds += len(base64.b64decode(event["audio"])) / 2 / 24_000
        async with text_socket(echo.url, "/v1/text-to-speech/default/stream-input?output_format=pcm_24000") as client:
            await client.send({"text": "".join(sentences)}, {"text": ""})
            times = []
            while not (message := await client.message())["isFinal"]:
                times += [message["alignment"]] if message["alignment"] else []
        long = sentences[0] * 30  # two pieces
        fields = {"response_format": "pcm", "stream_format": "sse", "timestamp_granularities": ["word"], "speed": 2}
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{echo.url}/v1/audio/speech", json={"input": long, **fields})
        echo.assert_idle()
    assert answer.status_code == 200, answer.text
    first, second = [event for event in spoken_events(answer) if event["type"] == "speech.audio.words"]
    border = len(first["text"]) * 0.02 / fields["speed"]
    assert f"{first['text']} {second['text']}" == long.strip()
    assert [word["word"] for word in first["words"]] == re.findall(r"\w+", first["text"])
    assert max(word["end"] for word in first["words"]) <= border < min(word["end"] for word in second["words"])
    assert max(word["end"] for word in second["words"]) <= border + len(second["text"]) * 0.02 / fields["speed"]
    for (event, length), alignment, sentence in zip(told, times, sentences, strict=True):
        words = event["words"]
        assert event["text"] == "".join(alignment["chars"]).strip() == sentence.strip()
        assert [word["word"] for word in words] == sentence.strip(" .").split()
        moments = [moment for word in words for moment in (word["start"], word["end"])]
        assert moments == sorted(moments)
        assert moments[-1] <= length
        for word in words:
            place = event["text"].index(word["word"])
            assert alignment["charStartTimesMs"][place] == round(1000 * word["start"])


def test_the_documented_program_prints_the_times_of_words(pipeline: HttpPipeline) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "docs" / "client.md").read_text(), re.M | re.S)
    (block,) = [block for block in blocks if '"words"' in block]
    program = block.replace("ipc:///tmp/omni-x/client", pipeline.endpoint)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY / "examples", capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\d+\.\d\d \d+\.\d\d (.*)", done.stdout, re.M) == [
        "What",
        "is",
        "the",
        "capital",
        "of",
        "Italy",
    ]


async def test_an_interrupted_answer_is_cut_at_the_word_that_was_heard(pipeline: HttpPipeline) -> None:
    """Echo stages make 0.1 s of sound of each letter; the toy aligner puts most words into the last seconds of it."""
    text = "The tide is full and the sea is calm, and all of the boats are on the shore, but one."
    overrides = {"stages.code2wav.engine.samples_per_token": 2400}
    with HttpPipeline(overrides=overrides, arguments=["--http-transcriber", pipeline.endpoint]) as echo:
        async with (
            AsyncOpenAI(base_url=f"{echo.url}/v1", api_key="none") as client,
            client.realtime.connect(model="echo") as connection,
            asyncio.timeout(30 * PATIENCE),
        ):
            content = [{"type": "input_text", "text": text}]
            await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
            await connection.response.create()
            turn = await answer_on(connection)
            item_id = turn.response.output[0].id
            words = await asyncio.to_thread(times_of, pipeline, turn.pcm, text)
            end, next_end = sorted({word.end for word in words})[:2]
            cut = (end + next_end) / 2
            heard = text[: next(word.place for word in words if word.end > cut)].rstrip()
            assert 0 < len(heard) < len(text)
            fields = {"item_id": item_id, "content_index": 0, "audio_end_ms": round(1000 * cut)}
            await connection.conversation.item.truncate(**fields)

            async def known() -> bool:
                await connection.conversation.item.retrieve(item_id=item_id)
                *_, event = await until_event(connection, "conversation.item.retrieved")
                return event.item.content[0].transcript == heard

            await eventually(known, 20, "the times of the words")
        echo.assert_idle()
