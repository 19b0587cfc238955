"""Turns that are written down while they are spoken, by a stage that hears a word in each quarter of a second."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import numpy
import pytest
import soundfile
import soxr
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from omni_actors.http_server.realtime.formats import RATE
from omni_actors.http_server.settings import ServerSettings
from tests.support.paths import REPOSITORY
from tests.support.pipelines import RunningPipeline
from tests.support.realtime import hear, openai_session, serving_sessions
from tests.support.scribe import STAGE, heard
from tests.support.servers import HttpPipeline

DELTA, COMPLETED = (f"conversation.item.input_audio_transcription.{kind}" for kind in ("delta", "completed"))
STOPPED = "input_audio_buffer.speech_stopped"
VAD = {"type": "server_vad"}
RECORDING, RECORDED = soundfile.read(REPOSITORY / "examples" / "question.wav", dtype="int16")
SPOKEN = soxr.resample(RECORDING[int(0.3 * RECORDED) : int(2.0 * RECORDED)], RECORDED, RATE)
SPEECH = numpy.tile(SPOKEN, 8)  # 14 s without a long silence
PIECE = RATE // 20


@pytest.fixture(scope="module")
def scribe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpPipeline]:
    config = tmp_path_factory.mktemp("scribe") / "scribe.yaml"
    config.write_text(json.dumps({"name": "scribe", "model": "echo", "stages": [STAGE]}))
    with HttpPipeline(config, environment={"OMNI_ACTORS_ALLOW_IMPORTS": "tests.support"}) as pipeline:
        yield pipeline
        pipeline.assert_idle()


def session(url: str, kind: str, **options: Any) -> AbstractAsyncContextManager[AsyncRealtimeConnection]:
    query = {"intent": "transcription"} if kind == "transcription" else {}
    audio = {"input": {"turn_detection": VAD, "transcription": {"model": "echo"}, **options}}
    return openai_session(url, query=query, type=kind, audio=audio)


async def turn(connection: AsyncRealtimeConnection, pieces: int) -> list[Any]:
    """The events of a turn: somebody speaks until so many pieces of text have come, and is then silent."""
    events: list[Any] = []

    async def microphone() -> None:
        for place in itertools.count(0, PIECE):
            speaking = len(deltas(events)) < pieces and not any(event.type == STOPPED for event in events)
            pcm = SPEECH[place : place + PIECE] if speaking else numpy.zeros(PIECE, "<i2")
            await hear(connection, pcm)
            await asyncio.sleep(0.02)  # two and a half times as fast as people speak

    speaker = asyncio.create_task(microphone())
    try:
        while not events or events[-1].type != COMPLETED:
            events.append(await connection.recv())
    finally:
        speaker.cancel()
        await asyncio.gather(speaker, return_exceptions=True)
    return events


def latest_requests(pipeline: HttpPipeline) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{pipeline.url}/v1/requests", params={"limit": 1}).json()["data"]
    return found


def deltas(events: list[Any]) -> list[str]:
    return [event.delta for event in events if event.type == DELTA]


def kinds(events: list[Any]) -> list[str]:
    return [event.type for event in events]


async def test_words_come_while_somebody_speaks_and_are_those_of_the_whole_turn(scribe: HttpPipeline) -> None:
    async with session(scribe.url, "transcription") as connection:
        for _ in range(3):
            events = await turn(connection, 4)
            stopped = kinds(events).index(STOPPED)
            early = deltas(events[:stopped])
            assert len(early) >= 4
            assert not "".join(early).endswith("."), "the last word is not said for sure"
            done = events[-1]
            (started,) = (event for event in events if event.type == "input_audio_buffer.speech_started")
            assert {event.item_id for event in events if event.type == DELTA} == {started.item_id}
            assert "".join(deltas(events)) == done.transcript
            (ended,) = (event for event in events if event.type == STOPPED)
            assert done.transcript == heard((ended.audio_end_ms - started.audio_start_ms) / 1000)
            words = len(done.transcript.split())
            assert done.usage.output_tokens == words - len("".join(early).split()), "the last request wrote the rest"


async def test_the_answer_to_a_turn_has_all_its_words_of_which_the_first_were_written_down_before(
    deaf_pipeline: RunningPipeline, scribe: HttpPipeline
) -> None:
    settings = ServerSettings(endpoint=deaf_pipeline.endpoint, transcriber=scribe.endpoint)
    with serving_sessions(settings) as url:
        events, transcript = await answered_turn(url)
    answer = "".join(event.delta for event in events if event.type == "response.output_audio_transcript.delta")
    assert answer == transcript, "echo stages say what they are told"
    assert len(transcript.split()) >= 5
    (latest,) = latest_requests(scribe)
    early = "".join(deltas(events[: kinds(events).index(STOPPED)]))
    assert latest["stages"][0]["output_tokens"] == len(transcript.split()) - len(early.split())
    deaf_pipeline.assert_idle()


async def answered_turn(url: str) -> tuple[list[Any], str]:
    """The events of a turn and its answer, and what was written down."""
    async with session(url, "realtime") as connection:
        events = await turn(connection, 4)
        assert kinds(events).index(STOPPED) > kinds(events).index(DELTA)
        (transcript,) = (event.transcript for event in events if event.type == COMPLETED)
        assert "".join(deltas(events)) == transcript
        while "response.done" not in kinds(events):
            events.append(await connection.recv())
    return events, transcript


async def test_turns_that_come_faster_than_they_are_written_down_are_all_written_down(scribe: HttpPipeline) -> None:
    async with session(scribe.url, "transcription", turn_detection=None) as connection:
        for quarters in (4, 8, 6):
            await hear(connection, SPEECH[: quarters * RATE // 4])
            await connection.input_audio_buffer.commit()
        texts = []
        while len(texts) < 3:
            event = await connection.recv()
            texts += [event.transcript] if event.type == COMPLETED else []
    assert texts == [heard(1), heard(2), heard(1.5)]
