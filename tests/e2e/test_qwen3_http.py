"""Qwen3-Omni as its users meet it: over HTTP, in a browser, in metrics and timelines, and what it refuses."""

from __future__ import annotations

import base64
import functools
from collections.abc import AsyncIterator, Iterator

import numpy
import openai
import pytest

from omni_actors.client import AsyncOmniClient, OmniClient
from omni_actors.errors import Aborted, DeadlineExceeded
from omni_actors.telemetry import metric_table as table
from tests.support.browser import ask, chromium, data, needs_chromium, open_page, until, watched_page
from tests.support.observations import STAGES, assert_causal, grown, reported, scrape_until, settled
from tests.support.realtime import spoken_turn
from tests.support.servers import HttpPipeline, close_clients, tone

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


def test_a_text_is_read_aloud(http: HttpPipeline) -> None:
    """In the voice that is asked for."""
    options: dict = {"model": MODEL, "input": "The tide is full.", "response_format": "pcm"}
    options["extra_body"] = {"seed": 3, "stage_params": SHORT}
    spoken = http.openai().audio.speech
    ethan, aiden = (spoken.create(voice=voice, **options).content for voice in ("ethan", "aiden"))
    assert len(ethan) == len(aiden) == 2 * (19 * FRAME - END)
    assert aiden != ethan


async def test_a_spoken_turn_equals_that_of_the_client_library(http: HttpPipeline, client: AsyncOmniClient) -> None:
    recording = (tone(1.0, 24_000) * 32767).astype("<i2")
    question = [{"role": "user", "content": [{"type": "audio", "audio": (recording, 24_000)}]}]
    wanted = await client.generate(question, voice="ethan", seed=5, params=SHORT, timeout=120)
    turn = await spoken_turn(http.url, MODEL, recording.tobytes(), "ethan", seed=5, stage_params=SHORT)
    assert turn.text == wanted.text
    numpy.testing.assert_allclose(samples(turn.pcm), wanted.audio.clip(-1, 1), atol=1e-4)


@needs_chromium
def test_the_web_page_plays_a_spoken_answer(http: HttpPipeline) -> None:
    with chromium() as browser, watched_page(browser) as page:
        open_page(page, http)
        assert {"aiden", "chelsie", "ethan"} <= set(page.locator("#voice option").all_inner_texts())
        ask(page, "Why is the sea salt?")
        until(page, lambda: data(page, "peak") > 0.02, "sound on the way to the loudspeaker")
        page.locator("#stop").click()


async def test_an_answer_is_timed_counted_and_given_credit(client: AsyncOmniClient) -> None:
    before = await settled(client)
    stream = await client.submit(QUESTION, params=SHORT, timeout=120)
    await stream.result()
    timeline = await client.timeline(stream.request_id)
    now = await scrape_until(client, functools.partial(reported, before, done=1))
    assert sorted(stage.stage for stage in timeline.stages) == sorted(STAGES)
    assert_causal(timeline)
    assert {stage.stage: stage.output_tokens for stage in timeline.stages}["talker"] == 20
    assert grown(before, now, table.OUTPUT_TOKENS, "talker", "0") == 20, "as in the usage"
    assert grown(before, now, table.STAGE_AUDIO, "code2wav", "0") == pytest.approx((19 * FRAME - END) / 24_000)
    edge = ("talker/0", "code2wav/0")
    assert grown(before, now, table.EDGE_MESSAGES, *edge) > 4, "frames go as they are made"
    assert 0 < now.value(table.EDGE_CREDIT, *edge) <= 2, "what `flow.edge_messages` allows"
    assert now.value(table.EDGE_OUT, *edge) <= 2


@pytest.mark.parametrize("end", ["deadline", "abort"])
async def test_an_answer_that_is_cut_off_is_held_by_no_stage(client: AsyncOmniClient, end: str) -> None:
    """While its sound comes: `http` then finds all stages idle."""
    stream = await client.submit(QUESTION, params=LONG, timeout=1.5 if end == "deadline" else 120)
    pieces = [await anext(stream)]
    if end == "abort":
        await stream.abort()
    with pytest.raises(DeadlineExceeded if end == "deadline" else Aborted):
        pieces += [piece async for piece in stream]


def test_what_is_refused_names_the_field(http: HttpPipeline) -> None:
    chat = http.openai().chat.completions
    spoken = {"modalities": ["text", "audio"]}
    cases: list[tuple[str, str, dict]] = [
        ("audio.voice", "unknown_voice", {"audio": {"voice": "Ethan", "format": "wav"}, **spoken}),
        ("messages", "prompt_too_long", {"messages": [{"role": "user", "content": "word " * 3000}]}),
        (
            "stage_params.talker.max_tokens",
            "invalid_value",
            {"extra_body": {"stage_params": {"talker": {"max_tokens": 0}}}},
        ),
    ]
    for param, code, fields in cases:
        with pytest.raises(openai.BadRequestError) as caught:
            chat.create(**{"model": MODEL, "messages": QUESTION, **fields})
        assert caught.value.param == param
        assert caught.value.code == code
