"""Encrypted links between two hosts, over a good cable and a bad one. Cut ones: test_launches.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omni_actors.transport.curve import make_cluster
from tests.support.network import Network
from tests.support.paths import REPOSITORY, import_path
from tests.support.waiting import until

pytestmark = pytest.mark.nightly

PEER = REPOSITORY / "tests" / "support" / "network_peer.py"
PORT = 29601


class Peer:
    """`network_peer.py` on one of the hosts."""

    def __init__(self, network: Network, host: int, output: Path, *arguments: str) -> None:
        self._output = output
        command = network.hosts[host].command(sys.executable, str(PEER), *arguments)
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": import_path()},
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def until(self, text: str, seconds: float = 10.0) -> None:
        until(lambda: text in self.output, seconds, lambda: f"{text}: {self.output[-500:]}")

    @property
    def numbers(self) -> list[int]:
        return [int(line.split()[1]) for line in self.output.splitlines() if line.startswith("got ")]


@pytest.fixture
def peers(network: Network, tmp_path: Path) -> Iterator[Callable[..., tuple[Peer, Peer]]]:
    """Starts a receiver on the first host and a sender on the second."""
    make_cluster(tmp_path / "keys")
    endpoint = f"tcp://{network.hosts[0].address}:{PORT}"
    started: list[Peer] = []

    def start(count: int) -> tuple[Peer, Peer]:
        started.append(Peer(network, 0, tmp_path / "receiver", "receive", endpoint, str(tmp_path / "keys")))
        started[0].until("listening")
        started.append(Peer(network, 1, tmp_path / "sender", "send", endpoint, str(tmp_path / "keys"), str(count)))
        return started[0], started[1]

    yield start
    for peer in started:
        peer.process.kill()
        peer.process.wait()


def test_the_hosts_are_two(network: Network) -> None:
    """Each has a network of its own, and this machine a third."""

    def said(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout

    own = said("readlink", "/proc/self/ns/net")
    assert len({own, *(said(*host.command("readlink", "/proc/self/ns/net")) for host in network.hosts)}) == 3
    for host, other in (network.hosts, network.hosts[::-1]):
        addresses = said(*host.command("ip", "-brief", "address"))
        assert host.address in addresses
        assert other.address not in addresses


def test_messages_arrive(peers: Callable[..., tuple[Peer, Peer]], network: Network) -> None:
    receiver, _ = peers(50)
    until(lambda: len(receiver.numbers) == 50, 10, "50 messages")
    assert receiver.numbers == list(range(50))
    assert network.cable.carried > 50


def test_a_slow_and_lossy_cable_loses_nothing(peers: Callable[..., tuple[Peer, Peer]], network: Network) -> None:
    """200 ms there and back, and one packet in twenty gone."""
    network.cable.delay, network.cable.loss = 0.1, 0.05
    receiver, _ = peers(60)
    until(lambda: len(receiver.numbers) == 60, 20, lambda: f"60 messages, not {len(receiver.numbers)}")
    assert receiver.numbers == list(range(60))
    assert network.cable.dropped
