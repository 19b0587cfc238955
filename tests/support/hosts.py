"""Two launchers on this machine that take each other for other hosts: 127.0.0.2 and 127.0.0.3."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.processes import processes_of
from tests.support.waiting import until

ADDRESSES = ("127.0.0.2", "127.0.0.3")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESSES[0], 0))
        return int(probe.getsockname()[1])


def spread_chain(**coordinator: Any) -> dict[str, Any]:
    """The echo chain with a talker and a vocoder on each of two nodes."""
    data = chain()
    for stage in data["stages"][2:]:
        stage.update({"replicas": 2, "node": [0, 1]})
    data["coordinator"] = {"heartbeat_interval": 0.2, "heartbeat_timeout": 2.0, **coordinator}
    return data


class Hosts:
    """Starts nodes of one pipeline, each with its folder."""

    def __init__(self, launch: Callable[..., EchoLauncher], folder: Path, data: dict[str, Any]) -> None:
        self._launch = launch
        self._folder = folder
        self._data = data
        self._port = free_port()

    def folder(self, rank: int) -> Path:
        return self._folder / f"host{rank}"

    def start(self, rank: int, *arguments: str) -> EchoLauncher:
        self.folder(rank).mkdir(exist_ok=True)
        return self._launch(
            self._data,
            "--nnodes",
            "2",
            "--node-rank",
            str(rank),
            "--node-addr",
            ADDRESSES[rank],
            "--master-addr",
            ADDRESSES[0],
            "--master-port",
            str(self._port),
            *arguments,
            folder=self.folder(rank),
        )

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
