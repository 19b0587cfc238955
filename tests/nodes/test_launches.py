"""A whole pipeline over two hosts: encrypted, over a good, a slow and lossy, and a cut network."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import OmniError
from omni_actors.transport.curve import make_client, make_cluster
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.load import ask_and_check, replicas, text_of
from tests.support.network import Network, Unavailable
from tests.support.paths import import_path
from tests.support.processes import end_all, processes_of
from tests.support.waiting import eventually, until


class Cluster:
    """The launchers of one pipeline, one on each host. Clients connect through the first one's socket file."""

    def __init__(self, network: Network, folder: Path, data: Any) -> None:
        self._folder = folder
        make_cluster(folder / "keys")
        self.launchers: dict[int, EchoLauncher] = {}
        for rank in (1, 0):
            own = folder / f"host{rank}"
            own.mkdir()
            arguments = f"--nnodes 2 --node-rank {rank} --master-addr {network.hosts[0].address}".split()
            arguments += ["--run-dir", str(own / "run"), "--keys", str(folder / "keys")]
            self.launchers[rank] = EchoLauncher(own, data, *arguments, within=network.hosts[rank].command)
        self.endpoint = self.launchers[0].wait_ready().endpoint

    def outputs(self) -> str:
        return "\n".join(f"--- host {rank}\n{one.output[-3000:]}" for rank, one in self.launchers.items())

    def end(self) -> None:
        for rank in sorted(self.launchers, reverse=True):
            if self.launchers[rank].process.poll() is None:
                os.killpg(self.launchers[rank].process.pid, signal.SIGTERM)
        for launcher in self.launchers.values():
            launcher.wait_end(15)
        until(lambda: not processes_of(self._folder), 5, lambda: f"left behind: {processes_of(self._folder)}")


@pytest.fixture(scope="session")
def shared_network():
    try:
        network = Network()
    except Unavailable as error:
        pytest.skip(f"no network namespaces on this machine: {error}")
    with network:
        yield network


@pytest.fixture
def network(shared_network):
    """Three hosts; the cable is whole again after each test."""
    yield shared_network
    shared_network.heal()


@pytest.fixture
def cluster(network, short_path):
    made: list[Cluster] = []

    def make(data: Any) -> Cluster:
        made.append(Cluster(network, short_path, data))
        return made[-1]

    try:
        yield make
        network.heal()
        for one in made:
            one.end()
    finally:
        end_all(short_path)


TYPED_SECONDS = 20.0  # by which a request over a broken network must have failed with a reason or been answered


def spread(silence: float = 2.0) -> dict[str, Any]:
    """Echo stages, the last two on the second host, which are lost after so many seconds of silence."""
    data = chain()
    for stage in data["stages"][2:]:
        stage["node"] = 1
    data["coordinator"] = {"heartbeat_interval": 0.2, "heartbeat_timeout": silence}
    return data


async def test_through_slow_and_cut_networks(cluster, network):
    pipeline = cluster(spread(5.0))  # no process may seem lost because this machine is busy
    async with AsyncOmniClient(pipeline.endpoint) as client:
        answered_at_once = await client.generate(text_of(1))
        assert sum(map(len, network.cable.carried)) > 10 * len(text_of(1)), "rows pass from host to host"
        assert not [packet for packet in network.cable.carried if answered_at_once.request_id.encode() in packet]
        before = {name: status.pid for name, status in (await replicas(client)).items()}

        network.cable.delay, network.cable.loss = 0.1, 0.05
        await asyncio.gather(*(ask_and_check(client, text_of(number)) for number in range(20)))
        network.heal()

        # Cut in the middle of the work: every request ends, with its answer or with a reason.
        asking = [asyncio.create_task(ask_and_check(client, text_of(number))) for number in range(20)]
        await asyncio.sleep(0.05)
        network.cable.is_cut = True  # and stays so until all of them have ended
        async with asyncio.timeout(TYPED_SECONDS):
            outcomes = await asyncio.gather(*asking, return_exceptions=True)
        wrong = [item for item in outcomes if isinstance(item, BaseException) and not isinstance(item, OmniError)]
        assert not wrong, wrong

        # And mended: the same processes serve again.
        network.heal()

        async def answered() -> bool:
            with contextlib.suppress(OmniError):
                await ask_and_check(client, text_of(99))
                return True
            return False

        await eventually(answered, 15, pipeline.outputs)
        assert {name: status.pid for name, status in (await replicas(client)).items()} == before


CLIENT_PORT = 29700
# Runs on the third host: asks for answers, says so once all are under way, and how each ended; then waits on `idle`.
CLIENT = """
import asyncio, sys
from omni_actors.client import AsyncOmniClient
from omni_actors.errors import OmniError
from tests.support.launcher import held
from tests.support.load import ask_and_check, text_of

async def end(client, number):
    try:
        await ask_and_check(client, text_of(number))
        return "answer"
    except OmniError as error:
        return error.code.value

async def main():
    async with AsyncOmniClient(sys.argv[1], keys=sys.argv[2]) as client:
        for line in sys.stdin:  # a number of answers, or idle
            if line == "idle\\n":
                while held(await client.describe()):
                    await asyncio.sleep(0.05)
                print("idle", flush=True)
                continue
            asked = [asyncio.create_task(end(client, number)) for number in range(int(line))]
            while (await client.describe()).in_flight < int(line):
                await asyncio.sleep(0.01)
            print("under way", flush=True)
            print(*await asyncio.gather(*asked), flush=True)

asyncio.run(main())
"""


@pytest.mark.nightly
@pytest.mark.parametrize("unplugged", [1, 0], ids=["a host with replicas", "the coordinator's host"])
async def test_a_host_whose_plug_is_pulled_costs_typed_errors_at_most_and_comes_back(
    cluster, network, short_path, unplugged
):
    """Each host has a talker and a vocoder; the client is on a third one."""
    data = spread()
    for stage in data["stages"][2:]:
        stage |= {"node": [0, 1], "replicas": 2, "engine": {"step_seconds": 0.05}}
    endpoint = f"tcp://{network.hosts[0].address}:{CLIENT_PORT}"
    data["coordinator"]["listen"] = endpoint
    pipeline = cluster(data)
    handed = make_client(short_path / "keys", "someone")
    client = await asyncio.create_subprocess_exec(
        *network.hosts[2].command(sys.executable, "-c", CLIENT, endpoint, str(handed)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": import_path()},
    )
    try:
        before = processes_of(short_path)
        client.stdin.write(b"20\n")
        assert await client.stdout.readline() == b"under way\n"
        network.cable.unplugged.add(network.hosts[unplugged].address)  # nothing says so to anyone
        async with asyncio.timeout(TYPED_SECONDS):
            ends = (await client.stdout.readline()).decode().split()
        assert ends == ["answer"] * 20 if unplugged else set(ends) <= {"answer", "timeout", "stage_lost"}, ends
        network.heal()

        async def all_answered() -> bool:
            client.stdin.write(b"20\n")
            await client.stdout.readline()
            return (await client.stdout.readline()).split() == [b"answer"] * 20

        await eventually(all_answered, 15, pipeline.outputs)
        client.stdin.write(b"idle\n")
        assert await client.stdout.readline() == b"idle\n"
        assert processes_of(short_path) == before
    finally:
        client.stdin.close()
        await client.wait()
