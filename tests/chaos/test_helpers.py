"""Processes beside the stages are killed or stand still: the fork server, a spare, what multiprocessing needs."""

from __future__ import annotations

import asyncio
import contextlib

import psutil
import pytest

from omni_actors.client import AsyncOmniClient, Text
from omni_actors.protocol.messages import Operation, StageStatus
from tests.support.launcher import EchoLauncher
from tests.support.load import (
    STAGES,
    Load,
    ask_and_check,
    connected,
    disturbed_chain,
    replicas,
    text_of,
    until_healthy,
    until_in_flight,
)
from tests.support.waiting import eventually, until


def helper(launcher: EchoLauncher, name: str) -> psutil.Process:
    """A process that the launcher has started for multiprocessing."""
    for child in psutil.Process(launcher.process.pid).children():
        with contextlib.suppress(psutil.ZombieProcess):  # the one before it
            if f"multiprocessing.{name}" in " ".join(child.cmdline()):
                return child
    raise AssertionError(f"there is no {name}")


async def test_all_stages_end_with_the_fork_server_and_no_request_is_lost(launch):
    """All processes of a host at once, as a fault under MPS ends all those of a GPU."""
    launcher = launch(disturbed_chain(0.005)).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client:
        before = {status.pid for status in (await replicas(client)).values()}
        hanging = psutil.Process((await replicas(client))["talker/0"].pid)
        helper(launcher, "resource_tracker").kill()  # which no one notices
        server = helper(launcher, "forkserver")
        await Load(client, total=48).run({0.2: lambda: (hanging.suspend(), server.kill())})
        await until_healthy(client)
        assert not hanging.is_running()
        after = {status.pid for status in (await replicas(client)).values()}
        counts = (await client.describe()).counts
    assert not before & after
    assert counts["replays"] > 0
    launcher.wait_idle()


@pytest.mark.nightly
async def test_a_fork_server_that_stands_still_is_replaced_once_it_is_needed(launch):
    data = disturbed_chain(0.005)
    data["coordinator"]["heartbeat_timeout"] = 3.0
    launcher = launch(data).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client:
        stopped = helper(launcher, "forkserver")
        stopped.suspend()
        await ask_and_check(client, text_of(1))
        asking = [asyncio.create_task(ask_and_check(client, text_of(number))) for number in range(20)]
        await until_in_flight(client, 20)
        psutil.Process((await replicas(client))["talker/0"].pid).kill()  # of which only its silence tells
        await asyncio.gather(*asking)
        await until_healthy(client)
    assert f"process {stopped.pid} stands still; killing it" in launcher.output


@pytest.mark.nightly
async def test_a_spare_that_dies_costs_nothing_and_comes_back(launch):
    launcher = launch(disturbed_chain(spares=1)).wait_ready()
    async with connected(launcher.endpoint) as (client, losses):
        before = await replicas(client)
        spares = [name for name, status in before.items() if status.spare]
        assert len(spares) == 4
        await Load(client).run({0.2: lambda: [losses.hit(before[name].pid, name, 9) for name in spares]})
        await losses.finish()

        async def all_back() -> bool:
            now = await replicas(client)
            return {name for name, status in now.items() if status.spare and status.state == "ready"} == set(spares)

        await eventually(all_back, 10, "the spares")
        description = await client.describe()
    assert losses.recovered == 4
    assert description.counts["replays"] == 0
    assert launcher.output.count(" again\n") == 4


def test_a_pipeline_ends_in_order_beside_a_fork_server_that_stands_still(launch):
    launcher = launch(disturbed_chain(0.0)).wait_ready()
    server = helper(launcher, "forkserver")
    server.suspend()
    assert launcher.end() == 0
    server.wait(10)  # until it is gone


TEXT = "".join(chr(65 + number % 50) for number in range(40))


async def test_an_answer_goes_on_though_a_replica_of_each_stage_dies_and_none_starts_again(launch):
    """The stages may not restart at all: whatever is heard after a death comes from the spares."""
    data = disturbed_chain(0.02, spares=1, restarts=0)
    data["coordinator"]["max_attempts"] = 2 * len(STAGES)
    launcher = launch(data).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client, AsyncOmniClient(launcher.endpoint) as other:
        undisturbed = await client.generate(TEXT, seed=1, modalities=["text", "audio"])
        before = await replicas(other)
        stream = await client.submit(TEXT, seed=1, modalities=["text", "audio"], timeout=60)
        left, letters, samples = list(STAGES), "", []
        async for item in stream:
            if isinstance(item, Text):
                letters += item.text
                continue
            samples.append(item.samples.tobytes())
            if left and len(samples) % 3 == 0:
                psutil.Process(before[f"{left.pop(0)}/0"].pid).kill()
        after = await replicas(other)
        assert not left, "all were killed while the answer was heard"
        assert letters == undisturbed.text
        assert b"".join(samples) == undisturbed.audio.tobytes()
        assert {name for name, status in after.items() if status.state == "dead"} == {f"{stage}/0" for stage in STAGES}
        assert all(after[f"{stage}/1"].pid == before[f"{stage}/1"].pid for stage in STAGES)
        assert (await other.describe()).healthy, "every place is taken"

        # A replica that is back is the spare of the one that replaced it, and shown as such.
        await other.operate(Operation.RESTART, "talker", 0)
        until(lambda: _talker(launcher, 0).state == "ready", 10, "talker/0 is back")
        assert _talker(launcher, 0).spare
        metrics = await other.metrics()
        assert 'omni_replica_ready{replica="1",stage="talker"} 1' in metrics
        assert 'omni_replica_spare{replica="0",stage="talker"} 1' in metrics
        psutil.Process(after["talker/1"].pid).kill()
        await ask_and_check(client, "who speaks now")
        assert not _talker(launcher, 0).spare


def _talker(launcher: EchoLauncher, number: int) -> StageStatus:
    return next(item for item in launcher.describe().stages if (item.stage, item.replica) == ("talker", number))
