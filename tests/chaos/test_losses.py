"""Replicas are killed, stopped or stuck while 200 requests run: every answer equals that of an undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import OmniError, Poison, StageLost, StageUnavailable
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

Launch = Callable[..., EchoLauncher]


async def pid_of(client: AsyncOmniClient, name: str) -> int:
    return (await replicas(client))[name].pid


@pytest.mark.parametrize("stage", ["thinker", *map(nightly, ("talker", "code2wav", "prompt"))])
async def test_a_stage_that_is_killed_three_times_loses_nothing(launch: Launch, stage: str) -> None:
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


@pytest.mark.nightly
async def test_two_hundred_requests_in_flight_are_all_replayed(launch: Launch) -> None:
    data = disturbed_chain(0.05)
    data["coordinator"]["heartbeat_timeout"] = 4.0  # not what this is about: to take 200 requests may take a while
    launcher = launch(data).wait_ready()
    async with connected(launcher.endpoint) as (client, losses):
        load = Load(client, width=200)
        running = asyncio.create_task(load.run())
        await until_in_flight(losses.client, 200)
        losses.kill("talker/0")
        await running
        await losses.finish()
        replays = (await client.describe()).counts["replays"]
    assert replays == 200, launcher.output


# -- stuck ------------------------------------------------------------------------------------------------------------


async def test_a_stopped_process_is_killed_and_started_again(launch: Launch) -> None:
    launcher = launch(disturbed_chain()).wait_ready()
    async with connected(launcher.endpoint) as (client, losses):
        pid = await pid_of(client, "talker/0")
        await Load(client).run({0.3: lambda: losses.hit(pid, "talker/0", signal.SIGSTOP)})
        await losses.finish()
    assert "talker/0 died (no sign of life for " in launcher.output
    assert "killed by signal 9" in launcher.output


@pytest.mark.parametrize(
    ("token", "reason", "stall_timeout"),
    [(HANG_TOKEN, "no progress for", 0.6), nightly(GRAB_TOKEN, "no sign of life for", 20.0)],
)
async def test_a_loop_that_hangs_is_killed_and_its_request_is_poison(
    launch: Launch, token: int, reason: str, stall_timeout: float
) -> None:
    launcher = launch(disturbed_chain(stall_timeout=stall_timeout)).wait_ready()
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


# -- crashes and restarts that fail -----------------------------------------------------------------------------------


async def test_one_poisonous_request_among_many_fails_alone(launch: Launch) -> None:
    """It is found among seven within six crashes; no other request fails."""
    launcher = launch(disturbed_chain(0.005)).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client:
        load = Load(client, total=30, width=6)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(0.1)
        with pytest.raises(Poison) as caught:
            await client.generate({"prompt_token_ids": [65] * 10 + [CRASH_TOKEN]}, modalities=["text"], timeout=30)
        await running
    assert 2 <= str(caught.value).count("prompt/0 (epoch") <= 6


@pytest.mark.nightly
async def test_a_request_that_takes_all_memory_fails_alone(launch: Launch) -> None:
    """An operating system limit on the address space of one stage; the allocation that fails is a real one."""
    data = disturbed_chain(0.005)
    data["stages"][1]["engine"]["memory_bytes"] = 256 << 20
    launcher = launch(data).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client:
        load = Load(client, total=30, width=6)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(0.1)
        tokens = [65] * 10 + [HOG_TOKEN]
        with pytest.raises(Poison) as caught:
            await client.generate({"prompt_token_ids": tokens}, modalities=["text"], timeout=30)
        await running
        await until_healthy(client)
        await ask_and_check(client, "alive")
    assert caught.value.stage == "thinker"
    assert "MemoryError" in launcher.output
    assert "prompt/0 died" not in launcher.output, "it keeps running"


@pytest.mark.parametrize("restarts", [nightly(0), 2])
async def test_a_pipeline_whose_stage_keeps_failing_to_start_is_degraded(
    launch: Launch, short_path: Path, restarts: int
) -> None:
    broken = short_path / "broken"
    data = disturbed_chain(0.01, restarts=restarts)
    data["stages"][3]["engine"]["fail_start_if"] = str(broken)
    launcher = launch(data).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client:
        speaking, text_only = await client.submit("x" * 200), await client.submit("y" * 200, modalities=["text"])
        await anext(speaking)
        broken.touch()
        psutil.Process(await pid_of(client, "code2wav/0")).kill()
        with pytest.raises(OmniError) as caught:
            await speaking.result()
        assert isinstance(caught.value, StageLost | StageUnavailable)
        assert caught.value.stage == "code2wav"
        assert (await text_only.result()).text == "y" * 200
        description = await client.describe()
        assert not description.healthy
        assert {item.stage: item.state for item in description.stages}["code2wav"] == "dead"
        with pytest.raises(StageUnavailable, match="'code2wav'"):
            await client.generate("x")
        assert (await client.generate("still", modalities=["text"])).text == "still"
        assert launcher.output.count("starting code2wav/0 again") == restarts
        until(lambda: "degraded: code2wav/0 died" in launcher.output, 5, "said so")
        assert launcher.output.count("A test made the start fail.") >= restarts


@pytest.mark.nightly
async def test_requests_sent_before_the_start_is_over_wait_for_it(launch: Launch, short_path: Path) -> None:
    data = disturbed_chain()
    data["stages"][2]["engine"]["start_seconds"] = 1.0
    launcher = launch(data, "--run-dir", str(short_path / "run"))
    until(lambda: "prompt/0 ready" in launcher.output, 20, "the first stage")
    async with AsyncOmniClient(f"ipc://{short_path}/run/client") as client:
        await ask_and_check(client, "early")


@pytest.fixture
def small_disk(short_path: Path) -> Iterator[Path]:
    """A folder on a separate disk with little room."""
    folder = short_path / "run"
    folder.mkdir(mode=0o700)
    options = "size=1m,mode=0700"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting takes rights that this user lacks")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.nightly
async def test_a_full_disk_stops_no_request_and_no_restart(launch: Launch, small_disk: Path) -> None:
    launcher = launch(disturbed_chain(), "--run-dir", str(small_disk)).wait_ready()
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        with contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        async with connected(launcher.endpoint) as (client, losses):
            await Load(client, total=60).run({0.3: lambda: losses.kill("talker/0")})
            await losses.finish()
    assert shutil.disk_usage(small_disk).free == 0
    assert launcher.end() == 0
