"""A pipeline whose model does not hear, with another one that writes down what is said; both echo texts."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from omni_actors.http_server.ears import Ears
from tests.support.realtime import answer_on, hear, metric, openai_session, speech
from tests.support.servers import HttpPipeline, sound

HEARD = "Write down what is said in this recording"  # what the ears, which echo, write down
DEAF = {"stages.prompt.engine.max_media": '{"audio": 0}'}


@pytest.fixture(scope="module")
def deaf_pipeline(echo_pipeline: HttpPipeline) -> Iterator[HttpPipeline]:
    with HttpPipeline(overrides=DEAF, arguments=["--http-transcriber", echo_pipeline.endpoint]) as pipeline:
        yield pipeline


@pytest.fixture
def deaf(deaf_pipeline: HttpPipeline, echo: HttpPipeline) -> Iterator[HttpPipeline]:
    """Idle again after each test, as are its ears."""
    yield deaf_pipeline
    deaf_pipeline.assert_idle()


def asked(recording: bytes, text: str) -> dict[str, object]:
    audio = {"data": base64.b64encode(recording).decode(), "format": "wav"}
    return {"role": "user", "content": [{"type": "input_audio", "input_audio": audio}, {"type": "text", "text": text}]}


def done(pipeline: HttpPipeline) -> float:
    return metric(pipeline.url, "omni_requests_total")


def test_a_chat_is_shown_the_texts_of_all_sounds_each_of_which_is_written_down_once(
    deaf: HttpPipeline, echo: HttpPipeline
) -> None:
    before = done(echo)
    messages = [asked(sound(0.5), "one"), {"role": "assistant", "content": "two"}, asked(sound(0.7), "three")]
    for count in (2, 2):
        answer = deaf.openai().chat.completions.create(model="echo", messages=messages, modalities=["text"])
        first, _, third = answer.choices[0].message.content.partition("onetwo")
        assert first.startswith(HEARD)
        assert third == f"{first}three"
        assert done(echo) - before == count, "the same sounds came again"
    assert httpx.get(f"{deaf.url}/v1/status").json()["max_media"] == {}, "clients may send sound"


async def test_a_spoken_turn_has_its_transcript_and_an_answer_to_it(deaf: HttpPipeline) -> None:
    heard = {"turn_detection": None, "transcription": {"model": "echo"}}
    async with openai_session(deaf.url, audio={"input": heard}) as connection:
        await hear(connection, speech(0.5))
        await connection.input_audio_buffer.commit()
        async for event in connection:
            if event.type == "conversation.item.input_audio_transcription.completed":
                break
        await connection.response.create()
        turn = await answer_on(connection)
    assert event.transcript.startswith(HEARD)
    assert turn.text == event.transcript


def test_recordings_go_to_the_ears(deaf: HttpPipeline, echo: HttpPipeline) -> None:
    before = done(echo)
    answer = deaf.openai().audio.transcriptions.create(model="echo", file=("a.wav", sound(0.9)))
    assert answer.text.startswith(HEARD)
    assert done(echo) == before + 1


def test_ears_that_are_not_there_are_named(tmp_path: Path) -> None:
    nowhere = f"ipc://{tmp_path}/client"
    with HttpPipeline(overrides=DEAF, arguments=["--http-transcriber", nowhere]) as pipeline:
        refused = httpx.post(f"{pipeline.url}/v1/chat/completions", json={"messages": [asked(sound(0.3), "x")]})
        assert refused.status_code == 503, refused.text
        assert refused.status_code == 503
        assert nowhere in refused.json()["error"]["message"]
        assert pipeline.openai().chat.completions.create(model="echo", messages=[{"role": "user", "content": "x"}])


async def test_ears_that_are_away_are_asked_for_times_of_words_once_in_a_while(tmp_path: Path) -> None:
    ears = Ears(f"ipc://{tmp_path}/client", None)
    async with ears.client:
        assert not await ears.aligns()
        again = asyncio.create_task(ears.aligns())
        await asyncio.sleep(0)
        assert again.done(), "it does not wait a second time"
        assert not again.result()
