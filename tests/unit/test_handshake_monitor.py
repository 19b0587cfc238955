"""What the events of a connection mean: a peer that is going away, a refusal, or a lost connection."""

from __future__ import annotations

import zmq

from omni_actors.errors import Unauthorized
from omni_actors.transport.curve import Keys
from omni_actors.transport.guard import HANG_UP_SECONDS, Verdict


def verdict(*events: tuple[float, int], keys: Keys | None = None) -> Verdict:
    made = Verdict("tcp://x:1", keys)
    for now, event in events:
        made.on(event, now)
    return made


HUNG_UP, CAME_UP = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_one_hang_up_is_a_peer_that_goes_away() -> None:
    assert verdict((0.0, HUNG_UP), (0.1, HUNG_UP), (1.9, HUNG_UP)).refusal is None
    assert verdict((0.0, HUNG_UP), (9.0, HUNG_UP)).refusal is None
    assert verdict((0.0, HUNG_UP), (0.1, HUNG_UP), (1.5, CAME_UP), (2.1, HUNG_UP)).refusal is None
    assert HANG_UP_SECONDS < 4, "a refused peer must know within 5 s"


def test_many_are_a_refusal_until_it_comes_up() -> None:
    refused = verdict((0.0, HUNG_UP), (0.1, HUNG_UP), (2.1, HUNG_UP))
    assert isinstance(refused.refusal, Unauthorized)
    assert not refused.final
    refused.on(CAME_UP, 3.0)
    assert refused.refusal is None


def test_only_an_established_connection_can_be_lost() -> None:
    gone = zmq.EVENT_DISCONNECTED
    assert not verdict((0.0, HUNG_UP), (0.0, gone)).disconnected
    assert verdict((0.0, CAME_UP), (1.0, gone)).disconnected
    assert verdict((0.0, CAME_UP), (1.0, gone), (2.0, CAME_UP)).disconnected  # until it is read
