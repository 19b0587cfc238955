"""Cut TCP links are detected; links of this host are not watched."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from omni_actors.config import FlowConfig
from omni_actors.protocol.fields import ReplicaId
from omni_actors.transport import sockets as sockets_module
from omni_actors.transport.link import PeerLinks
from omni_actors.transport.sockets import GRACE_SECONDS, PeerConnections, Socket, Sockets, try_send
from tests.support.paths import REPOSITORY
from tests.support.waiting import until

TALKER = ReplicaId("talker", 0, 1)


def linked(sockets: Sockets, endpoint: str) -> tuple[PeerLinks, Socket]:
    """A link to a replica, and the replica's PULL, which has received a message over it."""
    pull, endpoint = sockets.pull(endpoint)
    links = PeerLinks(sockets, FlowConfig())
    link = links.open(TALKER, endpoint)
    link.send("r", [b"x"])
    until(lambda: link.flush() or pull.poll(0), what="the message")
    return links, pull


def test_a_cut_link_is_found_once_its_peer_could_have_been_announced_dead(sockets: Sockets) -> None:
    links, pull = linked(sockets, "tcp://127.0.0.1:0")
    assert links.cut(0.0) == []
    pull.close()
    until(lambda: links.links[TALKER].socket.poll(0, zmq.POLLOUT) == 0, what="the loss of the connection")

    def is_found() -> bool:
        return links.cut(10.0) == [] and links.cut(10.0 + GRACE_SECONDS) == [TALKER]

    until(is_found, what="its detection")
    assert links.cut(99.0) == [], "once"
    links.close(TALKER)


def test_a_socket_file_is_not_watched(sockets: Sockets, short_path: Path) -> None:
    links, pull = linked(sockets, f"ipc://{short_path}/inbox")
    pull.close()
    until(lambda: links.links[TALKER].socket.poll(0, zmq.POLLOUT) == 0, what="the loss of the connection")
    assert links.cut(0.0) == []
    assert links.cut(99.0) == []
    links.close(TALKER)


def test_a_router_s_peers_are_gone_when_their_connections_are(sockets: Sockets, short_path: Path) -> None:
    router, endpoint = sockets.router(f"ipc://{short_path}/clients")
    peers, witness = PeerConnections(), PeerConnections()
    moments = itertools.count(0.0, 10 * GRACE_SECONDS)

    def connect(name: bytes) -> Socket:
        dealer, monitor = sockets.dealer(endpoint, name)
        monitor.close()
        try_send(dealer, [b"x"])
        until(lambda: router.poll(0), what="the message")
        _, descriptor, peer, _ = sockets.receive_from_client(router)
        for each in (peers, witness):
            each.heard(peer, descriptor)
        return dealer

    def found(by: PeerConnections = peers) -> list[bytes]:
        now = next(moments)
        return by.gone(now) + by.gone(now + GRACE_SECONDS)

    alice, bob = connect(b"alice"), connect(b"bob")
    assert found() == []
    alice.close(linger=0)
    until(lambda: found() == [b"alice"], what="the detection")
    assert found() == [], "each only once"
    bob.close(linger=0)
    until(lambda: b"bob" in found(witness), what="the end of its connection")
    assert peers.gone(next(moments)) == [], "not yet"
    carol = connect(b"carol")  # perhaps with the descriptor that was bob's
    back = connect(b"bob")
    assert found() == [], "it came back in time"
    for dealer in (back, carol):
        dealer.close(linger=0)
    left = {b"bob", b"carol"}  # one may be noticed before the other

    def all_found() -> bool:
        left.difference_update(found())
        return not left

    until(all_found, what="the detection of both")


def test_a_message_that_outlived_its_connection_is_one_of_a_peer_that_is_gone() -> None:
    peers = PeerConnections()
    reading, writing = os.pipe()
    os.close(writing)
    peers.heard(b"alive", str(reading).encode())
    peers.heard(b"dead", str(writing).encode())
    peers.heard(b"unknown", b"")
    assert peers.gone(0.0) == []
    assert peers.gone(GRACE_SECONDS) == [b"dead"]
    other, _ = os.pipe()
    os.dup2(other, reading)  # another connection with the same descriptor
    assert peers.gone(10.0) == []
    assert peers.gone(10.0 + GRACE_SECONDS) == [b"alive"]


SILENT_PEER = """
import signal, sys
from omni_actors.transport import sockets
sockets.TCP_HEARTBEAT_MS = 100
dealer, _ = sockets.Sockets().dealer(sys.argv[1], b"peer")
dealer.send(b"hello")
signal.pause()
"""


def test_a_stopped_peer_is_found_although_no_heartbeat_gets_through_what_it_did_not_read(
    sockets: Sockets, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets_module, "TCP_HEARTBEAT_MS", 60_000)  # its own heartbeats have to do
    router, endpoint = sockets.router(f"ipc://{short_path}/clients")
    peers = PeerConnections()
    with subprocess.Popen([sys.executable, "-c", SILENT_PEER, endpoint], cwd=REPOSITORY) as process:
        try:
            until(lambda: router.poll(0), 20, "its message")
            _, descriptor, peer, _ = sockets.receive_from_client(router)
            peers.heard(peer, descriptor)
            for _ in range(2000):
                until(lambda: try_send(router, [peer, bytes(1000)]), what="room for a message")
            time.sleep(1.0)  # its own heartbeats pass what it leaves unread
            assert peers.gone(0.0) == []
            assert peers.gone(GRACE_SECONDS) == []

            def is_gone_when_stopped() -> bool:
                process.send_signal(signal.SIGCONT)
                time.sleep(0.3)  # a heartbeat of its own has to be the last that came; if it was late, again
                process.send_signal(signal.SIGSTOP)
                for _ in range(100):
                    try_send(router, [peer, bytes(100_000)])
                time.sleep(1.0)
                return peers.gone(0.0) == [] and peers.gone(GRACE_SECONDS) == [peer]

            until(is_gone_when_stopped, 5, "its end")
        finally:
            process.kill()
