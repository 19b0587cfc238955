"""A stage of the real pipeline is killed in the middle of an answer: the client gets the undisturbed one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import psutil
import pytest

from omni_actors.client import AsyncOmniClient, Audio, Text
from omni_actors.errors import StageLost
from tests.pipelines import RunningPipeline

pytestmark = pytest.mark.e2e

PARAMS = {
    "thinker": {"max_tokens": 24, "temperature": 0.8, "ignore_eos": True},
    "talker": {"max_tokens": 60, "min_tokens": 50, "temperature": 0.9, "top_k": 40},
}
PROMPT = "Tell me, in a few words, why the sea is salt and the rivers are not."


@pytest.fixture(scope="module")
def pipeline(tiny_checkpoint: Path) -> Iterator[RunningPipeline]:
    with RunningPipeline("stage_configs/tiny_qwen2_5_omni.yaml", {"model": tiny_checkpoint}) as running:
        yield running


async def answer(client: AsyncOmniClient, kill: str = "") -> tuple[str, list[int], numpy.ndarray]:
    """One seeded answer; the stage called `kill` dies after the fifth piece of text."""
    stream = await client.submit(PROMPT, seed=11, voice="Ethan", params=PARAMS, timeout=120)
    texts, tokens, audio = [], [], []
    async for item in stream:
        if isinstance(item, Text):
            texts.append(item.text)
            tokens += item.token_ids
            if kill and len(texts) == 5:
                stages = (await client.describe()).stages
                os.kill(next(status.pid for status in stages if status.stage == kill), signal.SIGKILL)
        elif isinstance(item, Audio):
            audio.append(item.samples)
    return "".join(texts), tokens, numpy.concatenate(audio)


@pytest.mark.parametrize("stage", ["talker", "thinker"])
async def test_sigkill_mid_answer(pipeline: RunningPipeline, stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with AsyncOmniClient(pipeline.endpoint) as client:
        undisturbed = await answer(client)
        replays = (await client.describe()).counts["replays"]
        began = time.monotonic()
        disturbed = await answer(client, stage)
        seconds = time.monotonic() - began
        assert (await client.describe()).counts["replays"] == replays + 1
        while not (await client.describe()).healthy:  # noqa: ASYNC110 - the state is another process's
            await asyncio.sleep(0.1)
    with capsys.disabled():
        print(f"\nSIGKILL of {stage} mid-answer: the whole answer after {seconds:.1f} s")
    assert len(undisturbed[1]) == 24
    assert disturbed[:2] == undisturbed[:2]
    assert disturbed[2].shape == undisturbed[2].shape
    assert float(numpy.abs(disturbed[2] - undisturbed[2]).max()) <= 1e-5
    pipeline.assert_idle()


async def test_sigkill_of_the_coordinator_mid_answer(
    pipeline: RunningPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    """No model is loaded again, and the next answer is the same as ever."""
    async with AsyncOmniClient(pipeline.endpoint) as client:
        undisturbed = await answer(client)
        pids = [status.pid for status in (await client.describe()).stages]
        children = psutil.Process(pipeline.process.pid).children()
        [coordinator] = [child for child in children if child.cmdline()[0] == "omni:coordinator"]
        stream = await client.submit(PROMPT, seed=11, voice="Ethan", params=PARAMS, timeout=120)
        await anext(stream)
        coordinator.kill()
        began = time.monotonic()
        with pytest.raises(StageLost):
            await stream.result()
        ended = time.monotonic() - began
        again = await answer(client)
        answered = time.monotonic() - began
        assert [status.pid for status in (await client.describe()).stages] == pids
    with capsys.disabled():
        print(f"\nSIGKILL of the coordinator: the request ended after {ended:.1f} s, the next answer {answered:.1f} s")
    assert ended < 5.0
    assert again[:2] == undisturbed[:2]
    assert float(numpy.abs(again[2] - undisturbed[2]).max()) <= 1e-5
    pipeline.assert_idle()
