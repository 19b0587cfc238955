"""What the events of a connection mean: a peer that is going away, a refusal, or a lost connection."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import zmq

from omni_actors.errors import Unauthorized
from omni_actors.transport.guard import HANG_UP_SECONDS, HandshakeMonitor
from omni_actors.transport.sockets import Sockets

After = Callable[..., HandshakeMonitor]


@pytest.fixture
def after(sockets: Sockets) -> After:
    """A monitor after these events, each with its time."""
    kept: list[HandshakeMonitor] = []  # libzmq names a monitor by its socket's descriptor, and forgets it later

    def made(*events: tuple[float, int]) -> HandshakeMonitor:
        monitor = HandshakeMonitor(sockets.context.socket(zmq.DEALER), "tcp://x:1", None)
        kept.append(monitor)
        for now, event in events:
            monitor.note(event, now)
        return monitor

    return made


HUNG_UP, CAME_UP = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_one_hang_up_is_a_peer_that_goes_away(after: After) -> None:
    assert after((0.0, HUNG_UP), (0.1, HUNG_UP), (1.9, HUNG_UP)).refusal is None
    assert after((0.0, HUNG_UP), (9.0, HUNG_UP)).refusal is None
    assert after((0.0, HUNG_UP), (0.1, HUNG_UP), (1.5, CAME_UP), (2.1, HUNG_UP)).refusal is None
    assert HANG_UP_SECONDS < 4, "a refused peer must know within 5 s"


def test_many_are_a_refusal_until_it_comes_up(after: After) -> None:
    refused = after((0.0, HUNG_UP), (0.1, HUNG_UP), (2.1, HUNG_UP))
    assert isinstance(refused.refusal, Unauthorized)
    assert not refused.final
    refused.note(CAME_UP, 3.0)
    assert refused.refusal is None


def test_only_an_established_connection_can_be_lost(after: After) -> None:
    gone = zmq.EVENT_DISCONNECTED
    assert not after((0.0, HUNG_UP), (0.0, gone)).disconnected
    assert after((0.0, CAME_UP), (1.0, gone)).disconnected
    assert after((0.0, CAME_UP), (1.0, gone), (2.0, CAME_UP)).disconnected  # until it is read
