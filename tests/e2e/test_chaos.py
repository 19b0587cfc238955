"""A stage of the real pipeline is killed in the middle of an answer: the client gets the undisturbed one."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy
import psutil
import pytest

from omni_actors.client import AsyncOmniClient, Audio, Text
from omni_actors.errors import StageLost, StageUnavailable
from tests.support.pipelines import RunningPipeline

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

PARAMS = {
    "thinker": {"max_tokens": 24, "temperature": 0.8, "ignore_eos": True},
    "talker": {"max_tokens": 60, "min_tokens": 50, "temperature": 0.9, "top_k": 40},
}
STAGES = ("prompt", "thinker", "talker", "code2wav")
Answer = tuple[str, list[int], numpy.ndarray]
PROMPT = "Tell me, in a few words, why the sea is salt and the rivers are not."


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that may be broken."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("model") / "checkpoint"))


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> Iterator[RunningPipeline]:
    with RunningPipeline("stage_configs/tiny_qwen2_5_omni.yaml", {"model": checkpoint}) as running:
        yield running


async def answer(client: AsyncOmniClient, kill: str = "") -> Answer:
    """One seeded answer; the stage called `kill` dies after the fifth piece of text, code2wav after its first sound."""
    stream = await client.submit(PROMPT, seed=11, voice="Ethan", params=PARAMS, timeout=120)
    texts, tokens, audio = [], [], []
    async for item in stream:
        if isinstance(item, Text):
            texts.append(item.text)
            tokens += item.token_ids
        elif isinstance(item, Audio):
            audio.append(item.samples)
        if kill and (audio if kill == "code2wav" else len(texts) == 5):
            stages = (await client.describe()).stages
            psutil.Process(next(status.pid for status in stages if status.stage == kill)).kill()
            kill = ""
    return "".join(texts), tokens, numpy.concatenate(audio)


@pytest.fixture(scope="module")
def undisturbed(pipeline: RunningPipeline) -> Answer:
    """The answer of the first life of every process."""

    async def ask() -> Answer:
        async with AsyncOmniClient(pipeline.endpoint) as client:
            return await answer(client)

    made = asyncio.run(ask())
    assert len(made[1]) == 24
    return made


async def runs(client: AsyncOmniClient) -> dict[str, int]:
    """How often each stage began to compute a request, in its present life; known with the next heartbeat."""
    await asyncio.sleep(1.0)
    return {status.stage: status.counts["total_runs"] for status in (await client.describe()).stages}


@pytest.mark.parametrize("stage", ["code2wav", "talker", "thinker"])
async def test_sigkill_mid_answer(pipeline: RunningPipeline, undisturbed: Answer, stage: str) -> None:
    async with AsyncOmniClient(pipeline.endpoint) as client:
        replays, before = (await client.describe()).counts["replays"], await runs(client)
        disturbed = await answer(client, stage)
        assert (await client.describe()).counts["replays"] == replays + 1
        while not (await client.describe()).healthy:  # noqa: ASYNC110 - the state is another process's
            await asyncio.sleep(0.1)
        after = await runs(client)
        start = next(status.start for status in (await client.describe()).stages if status.stage == stage)
    assert {"process", "connection", "configuration", "device", "weights", "warm-up"} <= set(start)
    upstream = STAGES[: STAGES.index(stage)]
    assert {name: after[name] - before[name] for name in upstream} == dict.fromkeys(upstream, 1)
    assert after[stage] == 1, "in its new life"
    assert disturbed[:2] == undisturbed[:2]
    assert disturbed[2].shape == undisturbed[2].shape
    assert float(numpy.abs(disturbed[2] - undisturbed[2]).max()) <= 1e-5
    pipeline.assert_idle()


async def test_sigkill_of_the_coordinator_mid_answer(pipeline: RunningPipeline, undisturbed: Answer) -> None:
    """No model is loaded again, and the next answer is the same as ever."""
    async with AsyncOmniClient(pipeline.endpoint) as client:
        pids = [status.pid for status in (await client.describe()).stages]
        children = psutil.Process(pipeline.process.pid).children()
        [coordinator] = [child for child in children if child.cmdline()[0] == "omni:coordinator"]
        stream = await client.submit(PROMPT, seed=11, voice="Ethan", params=PARAMS, timeout=120)
        await anext(stream)
        coordinator.kill()
        with pytest.raises(StageLost):
            async with asyncio.timeout(30):
                await stream.result()
        again = await answer(client)
        assert [status.pid for status in (await client.describe()).stages] == pids
    assert again[:2] == undisturbed[:2]
    assert float(numpy.abs(again[2] - undisturbed[2]).max()) <= 1e-5
    pipeline.assert_idle()


async def test_a_checkpoint_that_breaks_while_it_is_served(pipeline: RunningPipeline, checkpoint: Path) -> None:
    """A stage that cannot load it any more is given up, with the reason; those that have it go on. The last test."""
    text_only = {"modalities": ["text"], "params": {"thinker": PARAMS["thinker"]}, "seed": 5}
    async with AsyncOmniClient(pipeline.endpoint) as client:
        before = await client.generate(PROMPT, **text_only)
        weights = checkpoint / "model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)
        speaking = asyncio.create_task(client.generate(PROMPT, params=PARAMS, timeout=120))
        stages = {status.stage: status for status in (await client.describe()).stages}
        psutil.Process(stages["code2wav"].pid).kill()
        with pytest.raises(StageUnavailable, match="code2wav"):
            await speaking
        stages = {status.stage: status.state for status in (await client.describe()).stages}
        assert stages == {"prompt": "ready", "thinker": "ready", "talker": "ready", "code2wav": "dead"}
        assert (await client.generate(PROMPT, **text_only)).text == before.text
        with pytest.raises(StageUnavailable, match="code2wav"):
            await client.generate(PROMPT)
    log = (pipeline.run_dir / "logs" / "code2wav-0.log").read_text()
    assert f"The engine core for {checkpoint} does not start: SafetensorError" in log
