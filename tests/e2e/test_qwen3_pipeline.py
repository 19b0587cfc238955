"""Qwen3-Omni as users run it: launcher, four processes, client. Answers are compared with transformers; stages die."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy
import psutil
import pytest
from PIL import Image

from omni_actors.client import AsyncOmniClient, Audio, Text
from omni_actors.client.streams import OmniRequestOutput
from omni_actors.errors import StageLost
from tests.support.nightly import nightly
from tests.support.pipelines import RunningPipeline
from tests.support.qwen3_reference import Qwen3Reference, Qwen3Result
from tests.support.servers import HttpPipeline

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


@pytest.fixture(scope="module")
def pipeline(qwen3_http: HttpPipeline) -> RunningPipeline:
    return qwen3_http


def greedy(thinker: int, talker: int) -> dict[str, Any]:
    return {
        "thinker": {"max_tokens": thinker, **GREEDY},
        "talker": {"max_tokens": talker, **GREEDY, "repetition_penalty": 1.05},
    }


def assert_equal(output: OmniRequestOutput, wanted: Qwen3Result) -> None:
    assert output.token_ids == wanted.thinker_tokens
    assert output.sample_rate == 24_000
    waveform = wanted.waveform.numpy()
    assert output.audio.shape == waveform.shape
    peak = float(numpy.abs(waveform).max())
    assert peak > 0.05, "a silent reference proves nothing"
    assert float(numpy.abs(output.audio - waveform).max()) <= PEAK_TOLERANCE * peak


async def test_answers_at_once_are_those_that_transformers_gives_to_each(
    pipeline: RunningPipeline, qwen3_reference: Qwen3Reference
) -> None:
    """Whole chain: text, and sound that only the right codes of all 16 codebooks make."""
    noise = numpy.random.default_rng(3)
    tone = (0.3 * numpy.sin(0.05 * numpy.arange(16_000))).astype(numpy.float32)
    picture = noise.integers(0, 255, (96, 128, 3), dtype=numpy.uint8)
    film = noise.integers(0, 255, (4, 64, 64, 3), dtype=numpy.uint8)
    spoken = {"use_audio_in_video": True}
    media: list[tuple[list[str], dict[str, Any], dict[str, Any], dict[str, Any]]] = [  # for us, and for transformers
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
            {"videos": [film], "audios": [tone], "fps": 2.0, **spoken},
            spoken,
        ),
    ]
    nothing: tuple[list[str], dict[str, Any], dict[str, Any], dict[str, Any]] = ([], {}, {}, {})
    cases = [(TEXTS[index % 3], VOICES[index % 3], 6 + 4 * index, 12 + 7 * index, nothing) for index in range(4)]
    cases += [(TEXTS[1], voice, 8, 20, each) for voice, each in zip(VOICES, media, strict=True)]
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
        wanted = qwen3_reference.generate(
            inputs, voice=voice, thinker_max_tokens=thinker, talker_max_tokens=talker, **how
        )
        assert_equal(output, wanted)
        assert output.usage["code2wav"].first_output < output.usage["talker"].finished, "sound streams"
    pipeline.assert_idle()


async def test_a_text_only_answer_wakes_no_stage_of_speech(pipeline: RunningPipeline) -> None:
    async with AsyncOmniClient(pipeline.endpoint) as client:
        output = await client.generate(TEXTS[0], modalities=["text"], params={"thinker": {"max_tokens": 5}})
    assert len(output.token_ids) == 5
    assert set(output.usage) == {"prompt", "thinker"}


async def answer(client: AsyncOmniClient, kill: str = "") -> tuple[list[int], numpy.ndarray]:
    """A sampled answer, while whose stage `kill` dies.

    The prompt stage dies with the prompt, the vocoder after its first sound, another one after the third piece of text.
    """
    victim = await process_of(client, kill) if kill else psutil.Process()
    if kill == "prompt":
        victim.suspend()
    stream = await client.submit(TEXTS[1], seed=11, voice="aiden", params=SAMPLED, timeout=120)
    tokens: list[int] = []
    audio: list[numpy.ndarray] = []
    pieces = 0
    if kill == "prompt":
        await holds(client, kill)
        victim.kill()
        kill = ""
    async for item in stream:
        if isinstance(item, Text):
            tokens += item.token_ids
            pieces += 1
        elif isinstance(item, Audio):
            audio.append(item.samples)
        if kill and (audio if kill == "code2wav" else pieces == 3):
            victim.kill()
            kill = ""
    return tokens, numpy.concatenate(audio)


async def process_of(client: AsyncOmniClient, stage: str) -> psutil.Process:
    return psutil.Process(next(each.pid for each in (await client.describe()).stages if each.stage == stage))


async def holds(client: AsyncOmniClient, stage: str) -> None:
    """Wait until the coordinator has given a request to the stage."""
    while not any(each.in_flight for each in (await client.describe()).stages if each.stage == stage):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(pipeline: RunningPipeline) -> tuple[list[int], numpy.ndarray]:
    """The sampled answer, alone."""

    async def ask() -> tuple[list[int], numpy.ndarray]:
        async with AsyncOmniClient(pipeline.endpoint) as client:
            return await answer(client)

    tokens, sound = asyncio.run(ask())
    assert len(tokens) == 16
    assert len(sound) == 39 * 1920 - 555
    return tokens, sound


def assert_same(made: tuple[list[int], numpy.ndarray], wanted: tuple[list[int], numpy.ndarray]) -> None:
    assert made[0] == wanted[0]
    assert made[1].shape == wanted[1].shape
    assert float(numpy.abs(made[1] - wanted[1]).max()) <= 1e-4


async def test_a_seed_repeats_itself_among_other_answers(
    pipeline: RunningPipeline, undisturbed: tuple[list[int], numpy.ndarray]
) -> None:
    async with AsyncOmniClient(pipeline.endpoint) as client:
        others = [client.generate(text, seed=12, params=SAMPLED, timeout=120) for text in TEXTS]
        made, *rest = await asyncio.gather(answer(client), *others)
    assert_same(made, undisturbed)
    assert rest[1].token_ids != undisturbed[0], "another seed must matter"


@pytest.mark.parametrize("stage", ["code2wav", nightly("talker"), "thinker", nightly("prompt")])
async def test_a_stage_that_dies_mid_answer_changes_nothing_of_it(
    pipeline: RunningPipeline, undisturbed: tuple[list[int], numpy.ndarray], stage: str
) -> None:
    async with AsyncOmniClient(pipeline.endpoint) as client:
        replays = (await client.describe()).counts["replays"]
        made = await answer(client, stage)
        assert (await client.describe()).counts["replays"] == replays + 1
        while not (await client.describe()).healthy:  # noqa: ASYNC110 - the state is another process's
            await asyncio.sleep(0.1)
    assert_same(made, undisturbed)
    pipeline.assert_idle()


async def test_a_coordinator_that_dies_ends_the_answer_and_keeps_the_models(
    pipeline: RunningPipeline, undisturbed: tuple[list[int], numpy.ndarray]
) -> None:
    children = psutil.Process(pipeline.process.pid).children()
    (coordinator,) = (child for child in children if child.cmdline()[0] == "omni:coordinator")
    async with AsyncOmniClient(pipeline.endpoint) as client:
        pids = [status.pid for status in (await client.describe()).stages]
        stream = await client.submit(TEXTS[1], seed=11, voice="aiden", params=SAMPLED, timeout=120)
        await anext(stream)
        coordinator.kill()
        with pytest.raises(StageLost):
            async with asyncio.timeout(30):
                await stream.result()
        made = await answer(client)
        assert [status.pid for status in (await client.describe()).stages] == pids
    assert_same(made, undisturbed)
    pipeline.assert_idle()
