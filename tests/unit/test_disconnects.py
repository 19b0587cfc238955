"""Links that were cut are noticed, those of this host and those that were taken back are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_actors.transport.disconnects import GRACE_SECONDS, DisconnectDetector, DisconnectMonitor
from omni_actors.transport.sockets import Socket, Sockets, try_send
from tests.support.waiting import until


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.context.destroy(linger=0)


def linked(sockets: Sockets, endpoint: str) -> tuple[Socket, Socket, str]:
    """A PUSH, the PULL that has had a message of it, and where it is."""
    pull, endpoint = sockets.pull(endpoint)
    push = sockets.push(endpoint)
    until(lambda: try_send(push, [b"x"]))
    until(lambda: pull.poll(0))
    return push, pull, endpoint


def test_a_cut_link_is_found_once_its_peer_could_have_been_announced_dead(sockets: Sockets) -> None:
    push, pull, endpoint = linked(sockets, "tcp://127.0.0.1:0")
    cuts: DisconnectDetector[str] = DisconnectDetector()
    cuts.watch("talker", push, endpoint)
    assert cuts.found(0.0) == []
    pull.close()
    until(lambda: push.poll(0, 2) == 0)  # it takes no more: the link is gone
    until(lambda: cuts.found(10.0) == [] and cuts.found(10.0 + GRACE_SECONDS) == ["talker"])
    cuts.forget("talker")
    assert cuts.found(99.0) == []
    cuts.close()


def test_a_socket_file_is_no_link(sockets: Sockets, short_path: Path) -> None:
    push, pull, endpoint = linked(sockets, f"ipc://{short_path}/inbox")
    cuts: DisconnectDetector[str] = DisconnectDetector()
    cuts.watch("talker", push, endpoint)
    departures = DisconnectMonitor(push)
    pull.close()
    until(departures.seen)
    assert cuts.found(0.0) == cuts.found(99.0) == []
    departures.close()
    cuts.close()
