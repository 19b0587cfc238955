"""The coordinator is killed, stopped or kept from starting: stages keep their processes, clients get an error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import OmniError
from omni_actors.host.run_directory import FLEET
from omni_actors.protocol.messages import Operation
from tests.support.launcher import EchoLauncher
from tests.support.load import ask_and_check, disturbed_chain, replicas, text_of, until_healthy
from tests.support.processes import assert_nothing_left, processes_of
from tests.support.waiting import PATIENCE, until

Launch = Callable[..., EchoLauncher]
LOST = {"stage_lost", "timeout"}  # by which a client may learn that its coordinator has forgotten a request


def coordinator_of(folder: Path) -> int:
    return next((pid for pid, title in processes_of(folder).items() if title == "omni:coordinator"), 0)


def next_coordinator(folder: Path, former: int) -> int:
    def other() -> int:
        found = coordinator_of(folder)
        return found if found != former else 0

    return until(other, 10, "the next coordinator")


async def pids(client: AsyncOmniClient) -> dict[str, int]:
    return {name: status.pid for name, status in (await replicas(client)).items()}


async def test_a_killed_coordinator_comes_back_and_its_requests_end_typed(launch, short_path):
    """With 50 requests in flight: all of them end typed, and the next ones are answered."""
    launcher = launch(disturbed_chain(0.005)).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client, AsyncOmniClient(launcher.endpoint) as watcher:
        before = await pids(client)
        streams = [await client.submit("x" * 1000, timeout=120) for _ in range(50)]
        for stream in streams[:10]:
            await anext(stream)
        former = coordinator_of(short_path)
        psutil.Process(former).kill()
        await until_healthy(watcher)
        for number in range(2):  # on the same endpoint, with the same client, before the lost ones are known
            await ask_and_check(client, text_of(number))
        ends = await asyncio.gather(*(stream.result() for stream in streams), return_exceptions=True)
        assert all(isinstance(end, OmniError) and end.code.value in LOST and end.retryable for end in ends), ends[0]
        assert next_coordinator(short_path, former)
        assert await pids(watcher) == before, launcher.output
    launcher.wait_idle()
    assert launcher.output.count("the coordinator died (killed by signal 9) and is started again") == 1
    assert launcher.output.count("[omni_actors] starting ") == 1
    assert launcher.end() == 0


@pytest.mark.nightly
async def test_a_coordinator_that_hangs_is_replaced(launch, short_path):
    data = disturbed_chain()
    data["coordinator"]["heartbeat_timeout"] = 4.0
    launcher = launch(data).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client:
        before = await pids(client)
        former = coordinator_of(short_path)
        psutil.Process(former).suspend()
        await asyncio.to_thread(next_coordinator, short_path, former)
        await until_healthy(client)
        await ask_and_check(client, "awake")
        assert await pids(client) == before


@pytest.mark.nightly
def test_a_coordinator_that_keeps_dying_ends_the_launch(launch, short_path):
    data = disturbed_chain()
    data["coordinator"]["restarts"] = 1
    launcher = launch(data).wait_ready()
    former = coordinator_of(short_path)
    psutil.Process(former).kill()
    psutil.Process(next_coordinator(short_path, former)).kill()
    assert launcher.wait_end(15) == 1
    assert "The coordinator died (killed by signal 9), after 1 restart." in launcher.output
    assert_nothing_left(short_path, 1.0)


async def test_scale_and_drains_outlive_the_coordinator_and_a_broken_memory_is_no_silent_reset(launch, short_path):
    launcher = launch(disturbed_chain()).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client:
        await client.operate(Operation.SCALE, "talker", count=2)
        await until_talkers(client, {"talker/0": "ready", "talker/1": "ready"})
        await client.operate(Operation.DRAIN, "talker", 0)
        before = await pids(client)
        former = coordinator_of(short_path)
        psutil.Process(former).kill()
        next_coordinator(short_path, former)
        await until_talkers(client, {"talker/0": "draining", "talker/1": "ready"})
        assert await pids(client) == before, "no process was started or killed"
        await ask_and_check(client, "both remembered")

        memory = Path(launcher.endpoint.removeprefix("ipc://")).with_name(FLEET)
        memory.write_bytes(memory.read_bytes()[:-10])
        psutil.Process(coordinator_of(short_path)).kill()
        await asyncio.to_thread(until, lambda: f"Cannot read {memory}" in launcher.output, 20, "the refusal")
        assert "remove it, and the pipeline goes on" in launcher.output
        memory.unlink()
        await until_talkers(client, {"talker/0": "ready"})
        await ask_and_check(client, "as configured")


async def until_talkers(client: AsyncOmniClient, wanted: dict[str, str]) -> None:
    """Wait until the talkers are these, in these states, and the coordinator knows the process of every replica.

    There may be no coordinator for a while, and a new one hears of its replicas one after the other.
    """
    async with asyncio.timeout(20 * PATIENCE):
        while True:
            with contextlib.suppress(OmniError):
                stages = (await client.describe(1.0)).stages
                talkers = {f"talker/{item.replica}": item.state for item in stages if item.stage == "talker"}
                if talkers == wanted and all(item.pid for item in stages):
                    return
            await asyncio.sleep(0.05)
