"""Qwen3-Omni as users run it, with a client and over HTTP: answers compared with transformers; stages die."""

from __future__ import annotations

import asyncio
import base64

import numpy
import psutil
import pytest
from PIL import Image

from omni_actors.client import AsyncOmniClient, Audio, OmniClient, Text
from omni_actors.errors import Aborted, DeadlineExceeded
from tests.support.nightly import nightly

pytestmark = pytest.mark.e2e

TEXTS = ("Hi", "What is the capital of France?", "Tell me, in a few words, why the sea is salt. " * 3)
VOICES = ("ethan", "chelsie", "aiden")
GREEDY = {"temperature": 0.0}
PEAK_TOLERANCE = 1e-3  # another code in one of the 16 codebooks of one frame changes the sound by far more
SAMPLED = {
    "thinker": {"max_tokens": 16, "temperature": 0.8, "ignore_eos": True, "frequency_penalty": 0.5},
    "talker": {
        "max_tokens": 40,
        "min_tokens": 40,
        "temperature": 0.9,
        "top_k": 50,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
    },
}


@pytest.fixture
def pipeline(qwen3_http):
    """It holds nothing after a test."""
    yield qwen3_http
    qwen3_http.assert_idle()


def greedy(thinker, talker):
    return {
        "thinker": {"max_tokens": thinker, **GREEDY},
        "talker": {"max_tokens": talker, **GREEDY, "repetition_penalty": 1.05},
    }


def assert_equal(output, wanted):
    assert output.token_ids == wanted.thinker_tokens
    assert output.sample_rate == 24_000
    waveform = wanted.waveform.numpy()
    assert output.audio.shape == waveform.shape
    peak = float(numpy.abs(waveform).max())
    assert peak > 0.05, "a silent reference proves nothing"
    assert float(numpy.abs(output.audio - waveform).max()) <= PEAK_TOLERANCE * peak


async def test_answers_at_once_are_those_that_transformers_gives_to_each(pipeline, qwen3_reference):
    """Whole chain: text, and sound that only the right codes of all 16 codebooks make."""
    noise = numpy.random.default_rng(3)
    tone = (0.3 * numpy.sin(0.05 * numpy.arange(16_000))).astype(numpy.float32)
    picture = noise.integers(0, 255, (96, 128, 3), dtype=numpy.uint8)
    film = noise.integers(0, 255, (4, 64, 64, 3), dtype=numpy.uint8)
    together = {"use_audio_in_video": True}
    media = [  # for us, and for transformers
        ([], {}, {}, {}),
        (
            ["image", "audio"],
            {"audios": [(tone, 16_000)], "images": [picture]},
            {"audios": [tone], "images": [Image.fromarray(picture)]},
            {},
        ),
        (["video"], {"videos": [(film, 2.0)]}, {"videos": [film], "fps": 2.0}, {}),
        (
            ["video"],
            {"videos": [(film, 2.0, (tone, 16_000))]},
            {"videos": [film], "audios": [tone], "fps": 2.0, **together},
            together,
        ),
    ]
    cases = [(TEXTS[index % 3], VOICES[index % 3], 6 + 4 * index, 12 + 7 * index, media[0]) for index in range(3)]
    cases += [(TEXTS[1], voice, 8, 20, each) for voice, each in zip(VOICES, media[1:], strict=True)]
    async with AsyncOmniClient(pipeline.endpoint) as client:
        outputs = await asyncio.gather(
            *(
                client.generate(text, voice=voice, params=greedy(thinker, talker), timeout=120, **given)
                for text, voice, thinker, talker, (_, given, _, _) in cases
            )
        )
    for (text, voice, thinker, talker, (shown, _, oracle, how)), output in zip(cases, outputs, strict=True):
        parts = [*({"type": kind} for kind in shown), {"type": "text", "text": text}]
        inputs = qwen3_reference.inputs([{"role": "user", "content": parts}], **oracle)
        limits = {"thinker_max_tokens": thinker, "talker_max_tokens": talker}
        assert_equal(output, qwen3_reference.generate(inputs, voice=voice, **limits, **how))
    usages = [output.usage for output in outputs]
    assert any(usage["code2wav"].first_output < usage["talker"].finished for usage in usages), "sound streams"


def test_a_streamed_chat_is_that_of_the_client_library(pipeline):
    question, short = [{"role": "user", "content": TEXTS[1]}], greedy(8, 20)
    with OmniClient(pipeline.endpoint) as client:
        wanted = client.generate(question, voice="aiden", params=short, timeout=120)
        silent = client.generate(TEXTS[0], modalities=["text"], params={"thinker": {"max_tokens": 5}})
    assert len(silent.token_ids) == 5
    assert set(silent.usage) == {"prompt", "thinker"}, "a text alone wakes no stage of speech"
    text, pcm = "", b""
    for chunk in pipeline.openai().chat.completions.create(
        model="tiny-qwen3-omni",
        messages=question,
        modalities=["text", "audio"],
        audio={"voice": "aiden", "format": "pcm16"},
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"stage_params": short},
    ):
        audio = chunk.choices[0].delta.audio if chunk.choices else None
        text += (audio and audio.transcript) or ""
        pcm += base64.b64decode((audio and audio.data) or "")
    assert text == wanted.text
    assert wanted.audio.shape == (19 * 1920 - 555,)
    samples = numpy.frombuffer(pcm, "<i2") / 32767.0
    numpy.testing.assert_allclose(samples, wanted.audio.clip(-1, 1), atol=1e-4)
    assert chunk.usage.completion_tokens_details.audio_tokens == wanted.usage["talker"].output_tokens == 20


@pytest.mark.parametrize("end", ["deadline", "abort"])
async def test_an_answer_that_is_cut_off_while_its_sound_comes_is_held_by_no_stage(pipeline, end):
    long = {"thinker": {"max_tokens": 600, "ignore_eos": True}, "talker": {"max_tokens": 800, "min_tokens": 800}}
    async with AsyncOmniClient(pipeline.endpoint) as client:
        stream = await client.submit(TEXTS[1], params=long, timeout=1.5 if end == "deadline" else 120)

        async def listen():
            async for _ in stream:
                if end == "abort":
                    await stream.abort()

        with pytest.raises(DeadlineExceeded if end == "deadline" else Aborted):
            await listen()


COORDINATOR = "omni:coordinator"  # the name of its process


async def answer(client, kill=""):
    """Tokens and sound of a sampled answer, during which the stage `kill` dies, or the coordinator.

    The prompt stage dies with the prompt, the vocoder after its first sound, another one after the third piece of text.
    """

    async def stage():
        return next(each for each in (await client.describe()).stages if each.stage == kill)

    victim = None
    if kill == COORDINATOR:
        (victim,) = (each for each in psutil.Process().children(recursive=True) if each.cmdline()[:1] == [COORDINATOR])
    elif kill:
        victim = psutil.Process((await stage()).pid)
    if kill == "prompt":
        victim.suspend()
    stream = await client.submit(TEXTS[1], seed=11, voice="aiden", params=SAMPLED, timeout=120)
    if kill == "prompt":
        while not (await stage()).in_flight:  # noqa: ASYNC110 - the state is another process's
            await asyncio.sleep(0.01)
        victim.kill()
    tokens, audio, pieces = [], [], 0
    async for item in stream:
        if isinstance(item, Text):
            tokens += item.token_ids
            pieces += 1
        elif isinstance(item, Audio):
            audio.append(item.samples)
        if kill and victim.is_running() and (audio if kill == "code2wav" else pieces == 3):
            victim.kill()
    return tokens, numpy.concatenate(audio)


@pytest.fixture(scope="module")
def undisturbed(qwen3_http):
    """The sampled answer, alone."""

    async def ask():
        async with AsyncOmniClient(qwen3_http.endpoint) as client:
            return await answer(client)

    tokens, sound = asyncio.run(ask())
    assert len(tokens) == 16
    assert len(sound) == 39 * 1920 - 555
    return tokens, sound


def assert_same(made, wanted):
    assert made[0] == wanted[0]
    assert made[1].shape == wanted[1].shape
    assert float(numpy.abs(made[1] - wanted[1]).max()) <= 1e-4


@pytest.mark.parametrize("stage", ["thinker", *map(nightly, ("prompt", "talker", "code2wav"))])
async def test_a_stage_that_dies_mid_answer_changes_nothing_of_it(pipeline, undisturbed, stage):
    async with AsyncOmniClient(pipeline.endpoint) as client:
        replays = (await client.describe()).counts["replays"]
        made = await answer(client, stage)
        assert (await client.describe()).counts["replays"] == replays + 1
        while not (await client.describe()).healthy:  # noqa: ASYNC110 - the state is another process's
            await asyncio.sleep(0.1)
    assert_same(made, undisturbed)


@pytest.mark.nightly
async def test_a_coordinator_that_dies_mid_answer_changes_nothing_of_it(pipeline, undisturbed):
    """And the models stay."""
    async with AsyncOmniClient(pipeline.endpoint) as client:
        pids = [status.pid for status in (await client.describe()).stages]
        made = await answer(client, COORDINATOR)
        assert [status.pid for status in (await client.describe()).stages] == pids
    assert_same(made, undisturbed)
