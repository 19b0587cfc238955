"""Control messages wait for a peer that reads slowly, in order; what cannot be told is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_actors.coordinator.links import ControlLinks
from omni_actors.errors import InvalidPayload
from omni_actors.protocol.codec import Decoder
from omni_actors.protocol.fields import Limits, ReplicaId, identity_of
from omni_actors.protocol.messages import CoordinatorToStage, Shutdown
from omni_actors.transport.sockets import Socket, Sockets, drain, try_send
from tests.support.waiting import until

PEER = ReplicaId("talker", 0, 1)
REASON = "x" * 8000


def connected(sockets: Sockets, folder: Path) -> tuple[Socket, Socket]:
    """The coordinator's socket, and that of a stage which has said hello and reads nothing for now."""
    router, endpoint = sockets.router(f"ipc://{folder}/control")
    dealer, monitor = sockets.dealer(endpoint, identity_of(PEER))
    monitor.close()
    try_send(dealer, [b"hello"])
    until(lambda: router.poll(0), what="the hello")
    router.recv_multipart()
    return router, dealer


def test_what_a_peer_does_not_take_at_once_comes_later_and_in_order(
    sockets: Sockets, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, dealer = connected(sockets, short_path)
    links, count = ControlLinks(router, Limits()), 0
    takes = iter([True, True, False, False, True])  # zmq would keep a thousand messages for the peer

    def reluctant(*arguments: Any, **options: Any) -> bool:
        return next(takes, True) and try_send(*arguments, **options)

    monkeypatch.setattr("omni_actors.transport.link.try_send", reluctant)
    for count in range(1, 6):
        links.send(PEER, Shutdown(f"{count} {REASON}"))
    decoder: Decoder[CoordinatorToStage] = Decoder(CoordinatorToStage, Limits())
    heard: list[str] = []

    def read() -> bool:
        assert links.flush() == []
        heard.extend(decoder.decode(frames).body.reason.split()[0] for frames in drain(dealer))
        return len(heard) == count

    until(read, what="all messages")
    assert heard == ["1", "2", "3", "4", "5"]


def test_a_peer_that_takes_nothing_for_too_long_is_named_once(
    sockets: Sockets, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, _ = connected(sockets, short_path)
    now = 0.0
    links = ControlLinks(router, Limits(), lambda: now)
    monkeypatch.setattr("omni_actors.transport.link.try_send", lambda *arguments, **options: False)
    links.send(PEER, Shutdown("now"))
    assert links.flush() == []
    now = 60.0
    assert links.flush() == [PEER]
    assert links.flush() == []


def test_a_peer_that_is_gone_is_no_error_and_a_message_that_is_too_large_is_one(
    sockets: Sockets, short_path: Path
) -> None:
    router, _ = connected(sockets, short_path)
    links = ControlLinks(router, Limits(body_bytes=8192))
    links.send(ReplicaId("talker", 7, 1), Shutdown("nobody is there"))
    with pytest.raises(InvalidPayload):
        links.send(PEER, Shutdown(2 * REASON))
