"""Qwen3-Omni over HTTP: the answer that the client library gets, and nothing left of one that is cut off."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator

import numpy
import pytest

from omni_actors.client import AsyncOmniClient, OmniClient
from omni_actors.errors import Aborted, DeadlineExceeded
from tests.support.servers import HttpPipeline, close_clients

pytestmark = pytest.mark.e2e

MODEL = "tiny-qwen3-omni"
QUESTION = [{"role": "user", "content": "Why is the sea salt?"}]
SHORT = {"thinker": {"max_tokens": 8}, "talker": {"max_tokens": 20}}
LONG = {"thinker": {"max_tokens": 600, "ignore_eos": True}, "talker": {"max_tokens": 800, "min_tokens": 800}}
FRAME = 1920  # samples of 80 ms
END = 555  # samples that the end of the sound has less


@pytest.fixture
def http(qwen3_http: HttpPipeline) -> Iterator[HttpPipeline]:
    """Idle again after each test."""
    yield qwen3_http
    close_clients()
    qwen3_http.assert_idle()


@pytest.fixture
async def client(http: HttpPipeline) -> AsyncIterator[AsyncOmniClient]:
    async with AsyncOmniClient(http.endpoint) as client:
        yield client


def samples(pcm: bytes) -> numpy.ndarray:
    return numpy.frombuffer(pcm, "<i2") / 32767.0


def test_a_streamed_chat_is_that_of_the_client_library(http: HttpPipeline) -> None:
    with OmniClient(http.endpoint) as client:
        wanted = client.generate(QUESTION, voice="aiden", seed=5, params=SHORT, timeout=120)
    text, pcm = "", b""
    for chunk in http.openai().chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        modalities=["text", "audio"],
        audio={"voice": "aiden", "format": "pcm16"},
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"stage_params": SHORT},
    ):
        audio = chunk.choices[0].delta.audio if chunk.choices else None
        text += (audio and audio.transcript) or ""
        pcm += base64.b64decode((audio and audio.data) or "")
    assert text == wanted.text
    assert wanted.audio.shape == (19 * FRAME - END,)
    assert numpy.abs(wanted.audio).max() > 0.05
    numpy.testing.assert_allclose(samples(pcm), wanted.audio.clip(-1, 1), atol=1e-4)
    assert chunk.usage.completion_tokens_details.audio_tokens == wanted.usage["talker"].output_tokens == 20


@pytest.mark.parametrize("end", ["deadline", "abort"])
async def test_an_answer_that_is_cut_off_is_held_by_no_stage(client: AsyncOmniClient, end: str) -> None:
    """While its sound comes: `http` then finds all stages idle."""
    stream = await client.submit(QUESTION, params=LONG, timeout=1.5 if end == "deadline" else 120)

    async def listen() -> None:
        async for _ in stream:
            if end == "abort":
                await stream.abort()

    with pytest.raises(DeadlineExceeded if end == "deadline" else Aborted):
        await listen()
