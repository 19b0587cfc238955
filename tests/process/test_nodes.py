"""A pipeline over two nodes: placement, start, loss and return of a node."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_actors.cli.top import Scrape
from omni_actors.client import AsyncOmniClient
from omni_actors.errors import OmniError
from omni_actors.protocol.messages import Operation, StageStatus
from omni_actors.telemetry import metrics as table
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.load import ask_and_check, replicas, text_of, until_busy
from tests.support.observations import scrape_until
from tests.support.processes import assert_nothing_left, processes_of
from tests.support.servers import free_port
from tests.support.waiting import eventually, until

ADDRESSES = ("127.0.0.2", "127.0.0.3")


def spread_chain(**coordinator: Any) -> dict[str, Any]:
    """The echo chain with a talker and a vocoder on each of two nodes."""
    data = chain()
    for stage in data["stages"][2:]:
        stage.update({"replicas": 2, "node": [0, 1]})
    data["coordinator"] = {"heartbeat_interval": 0.2, "heartbeat_timeout": 2.0, **coordinator}
    return data


class Hosts:
    """Starts nodes of one pipeline on this machine that take each other for other hosts, each with its folder."""

    def __init__(self, launch, folder, data):
        self._launch = launch
        self._folder = folder
        self._data = data
        self._port = free_port(ADDRESSES[0])

    def folder(self, rank: int) -> Path:
        return self._folder / f"host{rank}"

    def start(self, rank: int, *arguments: str) -> EchoLauncher:
        self.folder(rank).mkdir(exist_ok=True)
        given = f"--nnodes 2 --node-rank {rank} --node-addr {ADDRESSES[rank]} --master-addr {ADDRESSES[0]}".split()
        given += ["--master-port", str(self._port), *arguments]
        return self._launch(self._data, *given, folder=self.folder(rank))

    def start_both(self, *arguments: str) -> tuple[EchoLauncher, EchoLauncher]:
        other, first = self.start(1, *arguments), self.start(0, *arguments)
        first.wait_ready()
        until(lambda: "node 1 serves" in other.output, 5, "the other node")
        return first, other

    def processes(self, rank: int) -> dict[int, str]:
        return processes_of(self.folder(rank))

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Signal every process of a host; to all others SIGSTOP looks like a cut link."""
        for pid in self.processes(rank):
            psutil.Process(pid).send_signal(number)


async def pids(client: AsyncOmniClient) -> dict[str, int]:
    return {name: status.pid for name, status in (await replicas(client)).items()}


async def wait_states(client: AsyncOmniClient, seconds: float, **states: str) -> None:
    """Until the replicas have these states; names with `_` for the slash."""
    wanted = {name.replace("_", "/"): state for name, state in states.items()}
    known: dict[str, StageStatus] = {}

    async def reached() -> bool:
        nonlocal known
        with contextlib.suppress(OmniError):
            known = await replicas(client)
        return bool(known) and all(known[name].state == state for name, state in wanted.items())

    await eventually(reached, seconds, lambda: f"{wanted}; they are { {n: s.state for n, s in known.items()} }")


async def ask_many(client: AsyncOmniClient, count: int) -> None:
    await asyncio.gather(*(ask_and_check(client, text_of(number)) for number in range(count)))


async def test_replicas_on_two_nodes_share_the_work(launch, short_path):
    """Each node runs its own talker and vocoder."""
    data = spread_chain()
    for stage in data["stages"][2:]:
        stage["engine"] = {"step_seconds": 0.004, "max_num_seqs": 1}
    data["stages"][1]["engine"] = {"row_width": 20_000}  # rows of 40 KB: through memory on one host, as frames between
    hosts = Hosts(launch, short_path, data)
    first, other = hosts.start_both("--metrics", "127.0.0.1:0")  # the same command on both
    assert "metrics on" not in other.output, "node 0 has those of all"
    assert "metrics on" in first.output
    async with AsyncOmniClient(first.endpoint) as client:
        before = await pids(client)
        here, there = hosts.processes(0), hosts.processes(1)
        assert {here.get(pid) or there[pid] for pid in before.values()} == {f"omni:{name}" for name in before}
        assert {name for name, pid in before.items() if pid in there} == {"talker/1", "code2wav/1"}
        await ask_many(client, 20)
        within, across = ("thinker/0", "talker/0"), ("thinker/0", "talker/1")

        def all_have_worked(now: Scrape) -> bool:
            done = [now.value(table.STAGE_REQUESTS, *name.split("/"), "done") for name in before]
            return all(done) and now.value(table.EDGE_MESSAGES, *across) > 0

        now = await scrape_until(client, all_have_worked)
        assert now.value(table.EDGE_SHARED, *within) > 40_000
        assert now.value(table.EDGE_SHARED, *across) == 0
        blocks = {name: status.counts.get("total_blocks", 0) for name, status in (await replicas(client)).items()}
        assert blocks["thinker/0"] > 0
        for stage in ("talker", "code2wav"):
            await client.operate(Operation.DRAIN, stage, 1)
        await ask_many(client, 8)
    assert first.end() == 0
    assert other.wait_end(5) == 0


async def test_a_node_joins_and_leaves_under_load_and_its_replica_moves(launch, short_path):
    hosts = Hosts(launch, short_path, {**chain(), "coordinator": {"heartbeat_interval": 0.2, "move_after": 1.0}})
    first = hosts.start(0).wait_ready()
    async with AsyncOmniClient(first.endpoint) as client, AsyncOmniClient(first.endpoint) as operator:
        over = asyncio.Event()

        async def ask() -> int:
            answered = 0
            while not over.is_set():
                await ask_many(client, 10)
                answered += 10
            return answered

        asking = asyncio.create_task(ask())
        other = hosts.start(1)
        await asyncio.to_thread(until, lambda: "node 1 has joined with no GPU" in first.output, 20, "joined")
        assert "nothing is placed on node 1 yet; it takes replicas" in other.output
        await operator.operate(Operation.SCALE, "talker", count=2, node=1)
        await wait_states(operator, 20, talker_0="ready", talker_1="ready")
        assert (await pids(operator))["talker/1"] in hosts.processes(1)
        await until_busy(operator, "talker/1")
        assert (await asyncio.to_thread(other.end)) == 0
        await asyncio.to_thread(until, lambda: "talker/1 moves from node 1 to node 0" in first.output, 20, "moved")
        await wait_states(operator, 20, talker_0="ready", talker_1="ready")
        assert (await pids(operator))["talker/1"] in hosts.processes(0)
        await until_busy(operator, "talker/1")
        over.set()
        assert await asking, "and none failed"
    assert first.end() == 0


@pytest.mark.nightly
async def test_a_node_that_is_out_of_reach_comes_back_without_loading(launch, short_path):
    data = spread_chain()
    for stage in data["stages"][2:]:
        stage["engine"] = {"step_seconds": 0.02}
    hosts = Hosts(launch, short_path, data)
    first, _ = hosts.start_both()
    async with AsyncOmniClient(first.endpoint) as client:
        before = await pids(client)
        running = [asyncio.create_task(ask_and_check(client, text_of(number))) for number in range(8)]

        async def has_work() -> int:
            return (await replicas(client))["talker/1"].in_flight

        await eventually(has_work, 10, "a request on the other node's talker")
        await client.operate(Operation.DRAIN, "code2wav", 1)
        hosts.signal(1, signal.SIGSTOP)
        await asyncio.gather(*running)  # answered while the node stands still
        await wait_states(client, 1, talker_1="dead", code2wav_1="dead")
        await ask_and_check(client, "without it")
        hosts.signal(1, signal.SIGCONT)
        await wait_states(client, 10, talker_1="ready", code2wav_1="draining")  # what was drained stays so
        await ask_many(client, 8)
        assert await pids(client) == before
        assert (await replicas(client))["code2wav/1"].state == "draining"
    assert "node 1 is away: silent for" in first.output
    first.wait_idle()


@pytest.mark.nightly
async def test_a_node_that_dies_may_join_again_and_one_that_stops_drains_first(launch, short_path):
    data = spread_chain(drain_timeout=60.0)
    data["stages"][2]["engine"] = {"step_seconds": 0.01}
    hosts = Hosts(launch, short_path, data)
    first, other = hosts.start_both()
    async with AsyncOmniClient(first.endpoint) as client:
        before = await pids(client)
        other.end(signal.SIGKILL)
        assert_nothing_left(hosts.folder(1), 5.0)
        await wait_states(client, 6, talker_1="dead", code2wav_1="dead")
        await ask_many(client, 4)
        again = hosts.start(1)
        await wait_states(client, 10, talker_1="ready", code2wav_1="ready")
        await ask_many(client, 4)
        after = await pids(client)
        assert {name for name in before if before[name] != after[name]} == {"talker/1", "code2wav/1"}
        for stage in ("talker", "code2wav"):
            await client.operate(Operation.DRAIN, stage, 0)
        asked = asyncio.create_task(ask_and_check(client, 6 * text_of(28)))
        await until_busy(client, "talker/1")
        again.process.send_signal(signal.SIGTERM)
        await asked  # which no other replica could have
        assert await asyncio.to_thread(again.wait_end) == 0
        assert "node 1 leaves; its requests have 60 s to finish" in again.output
        # It says goodbye, so the coordinator need not wait for its heartbeat timeout.
        await wait_states(client, 1, talker_1="dead", code2wav_1="dead")
        for stage in ("talker", "code2wav"):
            await client.operate(Operation.RESTART, stage, 0)
        await ask_and_check(client, "alone again")


def test_a_node_that_does_not_come_is_named(launch, short_path):
    hosts = Hosts(launch, short_path, spread_chain())
    first = hosts.start(0, "--startup-timeout", "2")
    assert first.wait_end(40) == 1
    assert re.search(r"missing: (node 0, )?node 1, .*talker/1 \(waiting for node 1\)", first.output)
    assert "is not ready in time while" in first.output
