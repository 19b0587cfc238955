"""The network of three hosts, made once, and a pipeline whose launchers are on the first two."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from omni_actors.transport.curve import make_cluster
from tests.support.launcher import EchoLauncher
from tests.support.network import Network, Unavailable
from tests.support.processes import end_all, processes_of
from tests.support.waiting import until


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
