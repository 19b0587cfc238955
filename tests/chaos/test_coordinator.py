"""The coordinator is killed, stopped or kept from starting: stages keep their processes, and requests go on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import psutil
import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.coordinator.core.requests import CLAIM_SECONDS
from omni_actors.errors import Aborted, OmniError
from omni_actors.host.run_directory import FLEET
from omni_actors.protocol.messages import Operation
from tests.support.load import ask_and_check, disturbed_chain, replicas, text_of, until_healthy, until_in_flight
from tests.support.processes import assert_nothing_left, coordinator_of
from tests.support.waiting import PATIENCE, until


def next_coordinator(folder: Path, former: int) -> int:
    def other() -> int:
        found = coordinator_of(folder)
        return found if found != former else 0

    return until(other, 10, "the next coordinator")


async def pids(client: AsyncOmniClient) -> dict[str, int]:
    return {name: status.pid for name, status in (await replicas(client)).items()}


async def test_a_killed_coordinator_comes_back_and_its_requests_go_on(launch, short_path):
    """With 50 requests in flight, twice in a row: nothing is lost, nothing comes twice, and stages compute on.

    No stage computes again what its client claims in time. On a machine so busy that a coordinator takes seconds to
    come back, that may be too late, but not for all 50, twice, as it would be without claims.
    """
    launcher = launch(disturbed_chain(0.015)).wait_ready()  # longer than two coordinators take to start
    async with AsyncOmniClient(launcher.endpoint) as client, AsyncOmniClient(launcher.endpoint) as watcher:
        before = await pids(client)
        texts = [text_of(number) * 10 for number in range(50)]
        asked = [asyncio.create_task(ask_and_check(client, text)) for text in texts]
        await until_in_flight(watcher, 50)
        slowest = 0.0
        for _ in range(2):
            former, killed = coordinator_of(short_path), time.monotonic()
            psutil.Process(former).kill()
            await until_healthy(watcher)
            slowest = max(slowest, time.monotonic() - killed)
            assert next_coordinator(short_path, former)
            assert not all(task.done() for task in asked)
        await ask_and_check(client, "others, too")
        await asyncio.gather(*asked)
        stages = await replicas(watcher)
        assert {name: status.pid for name, status in stages.items()} == before, launcher.output
        runs = {status.counts["total_runs"] for status in stages.values()}
        assert min(runs) >= 51
        assert max(runs) <= (51 if slowest < CLAIM_SECONDS / 3 else 101), slowest
    launcher.wait_idle()
    assert launcher.output.count("the coordinator died (killed by signal 9) and is started again") == 2
    assert launcher.output.count("[omni_actors] starting ") == 1
    assert launcher.end() == 0


async def test_a_stage_that_dies_with_the_coordinator_runs_its_part_again(disturbed, monkeypatch):
    """However long the next coordinator takes, by the measure of the client."""
    monkeypatch.setattr("omni_actors.client.async_client.PING_SECONDS", 0.1)
    monkeypatch.setattr("omni_actors.client.async_client.ANSWER_SECONDS", 0.1)
    async with AsyncOmniClient(disturbed.endpoint) as client, AsyncOmniClient(disturbed.endpoint) as watcher:
        asked = [asyncio.create_task(ask_and_check(client, text_of(number) * 20)) for number in range(10)]
        await until_in_flight(watcher, 10)
        talker = (await pids(watcher))["talker/0"]
        psutil.Process(coordinator_of(disturbed.folder)).kill()
        psutil.Process(talker).kill()
        await asyncio.gather(*asked)


async def test_what_is_aborted_while_there_is_no_coordinator_ends(disturbed):
    async with AsyncOmniClient(disturbed.endpoint) as client:
        stream = await client.submit("x" * 1000, timeout=120)
        await anext(stream)
        psutil.Process(coordinator_of(disturbed.folder)).kill()
        await stream.abort()
        with pytest.raises(Aborted):
            await stream.result()


async def test_what_was_asked_of_a_client_that_died_with_the_coordinator_ends(disturbed, monkeypatch):
    gone = AsyncOmniClient(disturbed.endpoint)
    async with AsyncOmniClient(disturbed.endpoint) as watcher:
        await gone.__aenter__()
        await gone.submit("x" * 4000, timeout=120)
        await until_in_flight(watcher, 1)
        psutil.Process(coordinator_of(disturbed.folder)).kill()
        monkeypatch.setattr(gone, "_send", lambda *arguments: None)
        await gone.close()
        await until_healthy(watcher)


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
