"""The network of three hosts, made once, and a pipeline whose launchers are on the first two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.launcher import READY
from tests.support.network import Network, Unavailable
from tests.support.paths import REPOSITORY, import_path
from tests.support.processes import end_all, processes_of
from tests.support.waiting import until

PORT = 29600


class Cluster:
    """The launchers of one pipeline, one on each host. Clients connect through the first one's socket file."""

    def __init__(self, network: Network, folder: Path, data: Any) -> None:
        self._network = network
        self._folder = folder
        self._config = folder / "pipeline.yaml"
        self._config.write_text(yaml.safe_dump(data, sort_keys=False))
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, rank: int, keys: Path, *arguments: str) -> None:
        host = self._network.hosts[rank]
        folder = self._folder / f"host{rank}"
        folder.mkdir(exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "omni_actors.launch",
            str(self._config),
            "--nnodes",
            "2",
            "--node-rank",
            str(rank),
            "--master-addr",
            self._network.hosts[0].address,
            "--master-port",
            str(PORT),
            "--run-dir",
            str(folder / "run"),
            "--keys",
            str(keys),
            *arguments,
        ]
        with (folder / "output").open("wb") as output:
            self.launchers[rank] = subprocess.Popen(
                host.command(*command),
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": import_path()},
            )

    def output(self, rank: int) -> str:
        return (self._folder / f"host{rank}" / "output").read_text(errors="replace")

    def wait_ready(self, seconds: float = 60.0) -> None:
        def ready() -> bool:
            assert all(launcher.poll() is None for launcher in self.launchers.values()), self.outputs()
            return READY.search(self.output(0)) is not None

        until(ready, seconds, self.outputs)

    def outputs(self) -> str:
        return "\n".join(f"--- host {rank}\n{self.output(rank)[-3000:]}" for rank in self.launchers)

    @property
    def endpoint(self) -> str:
        found = READY.search(self.output(0))
        assert found is not None
        return found[1]

    def end(self) -> None:
        for rank in sorted(self.launchers, reverse=True):
            if self.launchers[rank].poll() is None:
                os.killpg(self.launchers[rank].pid, signal.SIGTERM)
        for launcher in self.launchers.values():
            launcher.wait(15)
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
