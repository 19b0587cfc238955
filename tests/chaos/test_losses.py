"""Replicas are killed, stopped or stuck while 100 requests run: every answer equals that of an undisturbed run."""

from __future__ import annotations

import asyncio
import signal

import psutil
import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import Poison, StageLost, StageUnavailable
from omni_actors.stage.echo import CRASH_TOKEN, GRAB_TOKEN, HANG_TOKEN, HOG_TOKEN
from tests.support.launcher import EchoLauncher
from tests.support.load import (
    STAGES,
    Load,
    ask_and_check,
    connected,
    disturbed_chain,
    replicas,
    until_healthy,
    until_in_flight,
)
from tests.support.nightly import nightly
from tests.support.waiting import until


async def pid_of(client: AsyncOmniClient, name: str) -> int:
    return (await replicas(client))[name].pid


@pytest.mark.parametrize("stage", ["thinker", *map(nightly, ("talker", "code2wav", "prompt"))])
async def test_a_stage_that_is_killed_three_times_loses_nothing(launch, stage):
    data = disturbed_chain()
    data["stages"][0]["engine"]["step_seconds"] = 0.006  # it has something to lose whenever it is killed
    launcher = launch(data).wait_ready()
    name = f"{stage}/0"
    async with connected(launcher.endpoint) as (client, losses):
        load = Load(client)
        await load.run(dict.fromkeys((0.2, 0.5, 0.8), lambda: losses.kill(name)))
        await losses.finish()
        description = await client.describe()
    assert losses.recovered == 3
    assert description.counts["replays"] > 0
    for before in STAGES[: STAGES.index(stage)]:
        await_runs(launcher, before, load.total)
    assert description.healthy
    assert launcher.output.count(f"{name} died (killed by signal 9)") == 3
    launcher.wait_idle()


def await_runs(launcher: EchoLauncher, stage: str, runs: int) -> None:
    """Stages before the lost one computed every request once."""

    def counted() -> int:
        return next(item for item in launcher.describe().stages if item.stage == stage).counts["total_runs"]

    until(lambda: counted() >= runs, 5, lambda: f"{stage} ran {counted()} requests")
    assert counted() == runs


async def test_all_stages_that_die_at_once_lose_nothing(disturbed):
    async with connected(disturbed.endpoint) as (client, losses):
        asked = [asyncio.create_task(ask_and_check(client, "abcdefghij" * 20)) for _ in range(16)]
        await until_in_flight(client, 16)
        for name, status in (await replicas(client)).items():
            losses.hit(status.pid, name, signal.SIGKILL)
        await asyncio.gather(*asked)
        await losses.finish()
        assert losses.recovered == len(STAGES)


async def test_a_stopped_process_is_killed_and_started_again(launch):
    data = disturbed_chain()
    data["coordinator"]["heartbeat_timeout"] = 3.0
    launcher = launch(data).wait_ready()
    async with connected(launcher.endpoint) as (client, losses):
        pid = await pid_of(client, "talker/0")
        await Load(client).run({0.3: lambda: losses.hit(pid, "talker/0", signal.SIGSTOP)})
        await losses.finish()
    assert "talker/0 died (no sign of life for " in launcher.output
    assert "killed by signal 9" in launcher.output


@pytest.mark.parametrize(
    ("token", "reason", "stall_timeout"),
    [(HANG_TOKEN, "no progress for", 2.0), nightly(GRAB_TOKEN, "no sign of life for", 60.0)],
)
async def test_a_loop_that_hangs_is_killed_and_its_request_is_poison(launch, token, reason, stall_timeout):
    data = disturbed_chain()
    data["stages"][0]["stall_timeout"] = stall_timeout
    data["coordinator"]["heartbeat_timeout"] = 30.0 if token == HANG_TOKEN else 3.0
    launcher = launch(data).wait_ready()
    async with connected(launcher.endpoint) as (client, losses):
        pid = await pid_of(client, "prompt/0")
        stream = await client.submit({"prompt_token_ids": [65, token]}, modalities=["text"])
        losses.follow(pid, "prompt/0")  # the first stage that computes it
        with pytest.raises(Poison, match=reason) as caught:
            async for _ in stream:
                pass
        assert caught.value.stage == "prompt"
        assert not caught.value.retryable
        assert str(caught.value).count("prompt/0 (epoch") == 2, "its history"
        await until_healthy(client)
        await ask_and_check(client, "alive")
        await losses.finish()
    launcher.wait_idle()


async def test_one_poisonous_request_among_many_fails_alone(disturbed):
    """It is found among seven within six crashes; no other request fails."""
    async with AsyncOmniClient(disturbed.endpoint) as client:
        load = Load(client, total=30, width=6)
        running = asyncio.create_task(load.run())
        await until_in_flight(client, 6)
        with pytest.raises(Poison) as caught:
            await client.generate({"prompt_token_ids": [65] * 10 + [CRASH_TOKEN]}, modalities=["text"], timeout=30)
        await running
    assert 2 <= str(caught.value).count("prompt/0 (epoch") <= 6


@pytest.mark.nightly
async def test_a_request_that_takes_all_memory_fails_alone(launch):
    """An operating system limit on the address space of one stage; the allocation that fails is a real one."""
    data = disturbed_chain(0.005)
    data["stages"][1]["engine"]["memory_bytes"] = 256 << 20
    launcher = launch(data).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client:
        load = Load(client, total=30, width=6)
        running = asyncio.create_task(load.run())
        await until_in_flight(client, 6)
        tokens = [65] * 10 + [HOG_TOKEN]
        with pytest.raises(Poison) as caught:
            await client.generate({"prompt_token_ids": tokens}, modalities=["text"], timeout=30)
        await running
        await until_healthy(client)
        await ask_and_check(client, "alive")
    assert caught.value.stage == "thinker"
    assert "MemoryError" in launcher.output
    assert "prompt/0 died" not in launcher.output, "it keeps running"


async def test_a_pipeline_whose_stage_keeps_failing_to_start_is_degraded(launch, short_path):
    """Requests that do not need the stage are answered; those that do end at once."""
    broken = short_path / "broken"
    data = disturbed_chain(0.01, restarts=2)
    data["stages"][3]["engine"]["fail_start_if"] = str(broken)
    launcher = launch(data).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client:
        speaking, text_only = await client.submit("x" * 200), await client.submit("y" * 200, modalities=["text"])
        await anext(speaking)
        broken.touch()
        psutil.Process(await pid_of(client, "code2wav/0")).kill()
        with pytest.raises((StageLost, StageUnavailable)) as caught:
            await speaking.result()
        assert (caught.value.stage, caught.value.retryable) == ("code2wav", True)
        assert (await text_only.result()).text == "y" * 200
        description = await client.describe()
        assert not description.healthy
        assert {item.stage: item.state for item in description.stages}["code2wav"] == "dead"
        with pytest.raises(StageUnavailable, match="'code2wav'"):
            await client.generate("x")
        assert (await client.generate("still", modalities=["text"])).text == "still"
        assert launcher.output.count("starting code2wav/0 again") == 2
        until(lambda: "degraded: code2wav/0 died" in launcher.output, 5, "said so")
        assert launcher.output.count("A test made the start fail.") >= 2
