"""What strangers and clients may do to an endpoint, and which lost connections are found. Real sockets."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from omni_actors.config import FlowConfig
from omni_actors.errors import Unauthorized
from omni_actors.protocol.codec import FIXED_FRAMES
from omni_actors.protocol.fields import MAX_BUFFERS, ReplicaId
from omni_actors.transport import guard as guard_module
from omni_actors.transport import sockets as sockets_module
from omni_actors.transport.curve import EVERYONE, load_keys, make_cluster
from omni_actors.transport.guard import (
    HANG_UP_SECONDS,
    SENT_BEFORE_ACCEPTED,
    Connections,
    GuardedConnection,
    HandshakeMonitor,
)
from omni_actors.transport.link import PeerLinks
from omni_actors.transport.sockets import (
    GRACE_SECONDS,
    MAX_FRAMES,
    MAX_IDENTITY,
    Discarded,
    PeerConnections,
    Socket,
    Sockets,
    try_send,
)
from tests.support.waiting import until
from tests.support.zmtp import closed, connect, dealer, frame, greeting

TCP = "tcp://127.0.0.1:0"
MESSAGE_BYTES = 1 << 20
LONG_MS = 600_000  # for a handshake, so that it is not what ends a connection
Bound = tuple[Sockets, Socket, str]


@pytest.fixture
def bind() -> Iterator[Callable[..., Bound]]:
    """Binds a socket for clients; gives it with its factory and its endpoint."""
    made: list[Sockets] = []

    def one(keys: Path | None = None) -> Bound:
        made.append(Sockets(max_message_bytes=MESSAGE_BYTES, keys=load_keys(keys)))
        return made[-1], *made[-1].router(TCP, EVERYONE)

    yield one
    for sockets in made:
        sockets.context.destroy(linger=0)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_cluster(tmp_path / "keys")
    return tmp_path / "keys"


def messages(sockets: Sockets, router: Socket) -> list[list[bytes]]:
    """What has arrived, without what is known of the connections."""
    found = []
    while True:
        try:
            found.append(sockets.receive_from_client(router)[2:])
        except Discarded:
            continue
        except zmq.Again:
            return found


def arrives(sockets: Sockets, router: Socket, wanted: list[bytes]) -> None:
    until(lambda: wanted in messages(sockets, router), what="the message")


@contextlib.contextmanager
def member(keys: Path | None, endpoint: str) -> Iterator[Socket]:
    sockets = Sockets(keys=load_keys(keys))
    made, handshake = sockets.dealer(endpoint, b"member")
    yield made
    handshake.close()
    sockets.context.destroy(linger=0)


def test_silent_connections_make_room_for_those_that_speak(
    bind: Callable[..., Bound], keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "CONNECTIONS", 8)
    monkeypatch.setattr(sockets_module, "HANDSHAKE_MS", LONG_MS)
    sockets, router, endpoint = bind(keys)
    strangers = [connect(endpoint) for _ in range(32)]
    for stranger in strangers[::2]:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(greeting(b"CURVE"))
    for stranger in strangers[:24]:
        assert closed(stranger)
    with member(keys, endpoint) as mine:
        until(lambda: try_send(mine, [b"hello"]), what="a connection")
        arrives(sockets, router, [b"member", b"hello"])
        more = [connect(endpoint) for _ in range(32)]
        for stranger in more[:24]:
            assert closed(stranger)
        try_send(mine, [b"again"])
        arrives(sockets, router, [b"member", b"again"])
    for stranger in strangers + more:
        stranger.close()


def test_a_handshake_that_does_not_end_is_given_up(bind: Callable[..., Bound], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets_module, "HANDSHAKE_MS", 200)
    _, _, endpoint = bind()
    with connect(endpoint) as silent, connect(endpoint) as half:
        half.sendall(greeting()[:30])
        for made in (silent, half):
            assert closed(made)


@pytest.mark.parametrize("flags", [4, 6, 2], ids=["a short command", "a long command", "a message"])
def test_a_stranger_sends_no_more_than_a_handshake(
    bind: Callable[..., Bound], keys: Path, flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq keeps up to MAXMSGSIZE of it before it looks at the key."""
    monkeypatch.setattr(sockets_module, "HANDSHAKE_MS", LONG_MS)
    _, _, endpoint = bind(keys)
    with connect(endpoint) as stranger:
        stranger.sendall(greeting(b"CURVE"))
        stranger.sendall(bytes([flags, 200]) if flags == 4 else bytes([flags]) + struct.pack(">Q", MESSAGE_BYTES))
        with contextlib.suppress(ConnectionError):
            stranger.sendall(bytes(MESSAGE_BYTES // 2))
        assert closed(stranger)


def test_large_messages_of_members_pass(bind: Callable[..., Bound], keys: Path) -> None:
    """What they queue is not bounded by what a stranger may send, and each message completes the one before."""
    sockets, router, endpoint = bind(keys)
    large = os.urandom(MESSAGE_BYTES - 1000)  # room for what encryption adds
    with member(keys, endpoint) as mine:
        for number in range(12):
            until(lambda: try_send(mine, [large]), what="room for a message")
            if number % 4 == 3:
                arrives(sockets, router, [b"member", large])


def test_a_message_that_does_not_end_ends_its_connection(bind: Callable[..., Bound]) -> None:
    sockets, router, endpoint = bind()
    with dealer(endpoint, b"endless") as endless, dealer(endpoint, b"honest") as honest:
        honest.sendall(frame(bytes(MESSAGE_BYTES // 2), more=True))
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                endless.sendall(frame(bytes(MESSAGE_BYTES // 8), more=True))
        assert closed(endless)
        honest.sendall(frame(b"done"))
        arrives(sockets, router, [b"honest", bytes(MESSAGE_BYTES // 2), b"done"])


def test_the_message_with_most_buffers_arrives_whole(bind: Callable[..., Bound]) -> None:
    sockets, router, endpoint = bind()
    parts = [b"part"] * (FIXED_FRAMES + MAX_BUFFERS)
    with dealer(endpoint, b"most") as most:
        most.sendall(b"".join(frame(part, more=True) for part in parts[1:]) + frame(parts[0]))
        arrives(sockets, router, [b"most", *parts])


def test_a_message_of_too_many_frames_is_cut_and_the_next_ones_arrive(bind: Callable[..., Bound]) -> None:
    sockets, router, endpoint = bind()
    with dealer(endpoint, b"many") as many:
        many.sendall(frame(b"", more=True) * 20_000 + frame(b"last") + frame(b"next"))
        seen: list[list[bytes]] = []
        until(lambda: seen.extend(messages(sockets, router)) or [b"many", b"next"] in seen, what="the next message")
    assert seen == [[b"many", *[b""] * (MAX_FRAMES - 1)], [b"many", b"next"]]


def test_a_sender_with_a_huge_identity_is_ignored(bind: Callable[..., Bound]) -> None:
    sockets, router, endpoint = bind()
    with dealer(endpoint, b"i" * (MAX_IDENTITY + 1)) as huge, dealer(endpoint, b"i" * MAX_IDENTITY) as long:
        huge.sendall(frame(b"one"))
        until(lambda: router.getsockopt(zmq.EVENTS) & zmq.POLLIN, what="a message")
        assert messages(sockets, router) == []
        long.sendall(frame(b"two"))
        arrives(sockets, router, [b"i" * MAX_IDENTITY, b"two"])


def connection(descriptor: int, watched: bool = True) -> GuardedConnection:
    return GuardedConnection(descriptor, 0, watched)


def closed_of(connections: Connections, counters: dict[int, tuple[int, int]]) -> list[int]:
    """The descriptors of those that are to be closed, if these are the bytes sent and received."""
    return [leaving.descriptor for leaving, _ in connections.to_close(counters)]


def test_all_together_send_a_few_messages_without_ending_one_and_the_largest_leaves() -> None:
    connections = Connections(99, MESSAGE_BYTES, encrypted=True)
    counters = {}
    for number in range(6):
        connections.add(connection(number))
        counters[number] = (SENT_BEFORE_ACCEPTED + 1, MESSAGE_BYTES - 1000 * number)
    assert closed_of(connections, counters) == [0, 1]
    connections.heard(2, counters[2][1])
    assert closed_of(connections, {number: counters[number] for number in range(2, 6)}) == []


HUNG_UP, CAME_UP, GONE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


@pytest.mark.parametrize(
    ("events", "refused", "lost"),
    [
        ([(0.0, HUNG_UP), (0.1, HUNG_UP), (1.9, HUNG_UP)], False, False),  # a peer that goes away
        ([(0.0, HUNG_UP), (9.0, HUNG_UP)], False, False),
        ([(0.0, HUNG_UP), (0.1, HUNG_UP), (1.5, CAME_UP), (2.1, HUNG_UP)], False, False),
        ([(0.0, HUNG_UP), (0.1, HUNG_UP), (2.1, HUNG_UP)], True, False),
        ([(0.0, HUNG_UP), (0.1, HUNG_UP), (2.1, HUNG_UP), (3.0, CAME_UP)], False, False),
        ([(0.0, HUNG_UP), (0.0, GONE)], False, False),  # it was not there
        ([(0.0, CAME_UP), (1.0, GONE)], False, True),
        ([(0.0, CAME_UP), (1.0, GONE), (2.0, CAME_UP)], False, True),  # until it is read
    ],
)
def test_many_hang_ups_are_a_refusal_and_only_an_established_connection_is_lost(
    sockets: Sockets, events: list[tuple[float, int]], refused: bool, lost: bool
) -> None:
    monitor = HandshakeMonitor(sockets.context.socket(zmq.DEALER), "tcp://x:1", None)
    for now, event in events:
        monitor.note(event, now)
    assert isinstance(monitor.refusal, Unauthorized) is refused
    assert not monitor.final
    assert monitor.disconnected is lost
    assert HANG_UP_SECONDS < 4, "a refused peer must know within 5 s"


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


def test_a_message_that_outlived_its_connection_is_one_of_a_peer_that_is_gone() -> None:
    peers = PeerConnections()
    reading, writing = os.pipe()
    os.close(writing)
    peers.heard(b"alive", str(reading).encode())
    peers.heard(b"dead", str(writing).encode())
    peers.heard(b"back", str(writing).encode())
    peers.heard(b"unknown", b"")
    assert peers.gone(0.0) == []
    peers.heard(b"back", str(reading).encode())
    assert peers.gone(GRACE_SECONDS) == [b"dead"], "the other one came back in time"
    assert peers.gone(2 * GRACE_SECONDS) == [], "only once"
    other, _ = os.pipe()
    os.dup2(other, reading)  # another connection with the same descriptor
    assert peers.gone(10.0) == []
    assert peers.gone(10.0 + GRACE_SECONDS) == [b"alive", b"back"]
