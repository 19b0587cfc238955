"""Sockets, links with their credit, and readers: real sockets in one process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from zmq import EVENTS

from omni_actors.errors import InvalidRequest, ProtocolError
from omni_actors.transport import link as link_module
from omni_actors.transport.link import STALL_SECONDS, Link, ReceivedCredit, Window
from omni_actors.transport.sockets import PeerGone, Socket, SocketReader, Sockets, drain, try_send
from tests.support.clock import Clock
from tests.support.waiting import eventually, until


def test_bad_endpoints_are_typed_errors(sockets: Sockets, short_path: Path) -> None:
    for endpoint in ("udp://1.2.3.4:5", "tcp://host", "tcp://host:x", "tcp://:5", "tcp://h:70000", "x"):
        for make in (sockets.push, lambda endpoint: sockets.dealer(endpoint, b"x")):
            with pytest.raises(InvalidRequest, match="is not an endpoint"):
                make(endpoint)
    with pytest.raises(ProtocolError, match="Cannot bind"):
        sockets.pull(f"ipc://{short_path}/missing/inbox")


def test_router_raises_when_a_peer_is_gone(sockets: Sockets, short_path: Path) -> None:
    router, endpoint = sockets.router(f"ipc://{short_path}/r")
    with pytest.raises(PeerGone):
        try_send(router, [b"alice", b"x"])
    dealer, handshake = sockets.dealer(endpoint, b"alice")
    try_send(dealer, [b"hello"])
    until(lambda: drain(router) == [[b"alice", b"hello"]], what="the message")
    assert try_send(router, [b"alice", b"x"])
    handshake.close()
    dealer.close()

    def gone() -> bool:
        try:
            return not try_send(router, [b"alice", b"x"])
        except PeerGone:
            return True

    until(gone, what="the loss of the peer")


def test_link_is_bounded_in_messages_and_bytes(sockets: Sockets, short_path: Path) -> None:
    link = Link(sockets.push(f"ipc://{short_path}/absent"), Clock(), outbox_messages=3, outbox_bytes=100)
    assert link.send("big", [bytes(200)]), "one message may be larger than the bound"
    assert not link.send("next", [b"x"])
    assert link.give_up() == ["big"]
    assert link.backlog == 0
    assert [link.send(name, [b"x"]) for name in ("a", "b", "a", "c")] == [True, True, True, False]
    assert link.give_up() == ["a", "b"]
    assert link.send("d", [bytes(100)])


def test_window_in_messages_and_bytes() -> None:
    window = Window(2, 100)
    assert window.admits(1000), "when nothing else is out, any size may go"
    window.sent(60)
    assert window.admits(40)
    assert not window.admits(41)
    window.sent(10)
    assert not window.admits(1), "two messages are out"
    assert window.exhausted
    window.granted(1, 60)
    assert window.admits(90)
    window.granted(50, 5000)
    assert window.messages_out == 0, "credit for more than was sent is ignored"
    assert window.bytes_out == 0


def test_received_credit_is_granted_by_the_quarter_and_the_rest_on_the_tick() -> None:
    received: ReceivedCredit[str] = ReceivedCredit(8, 400)
    assert not received.take("a", 1)
    assert not received.take("b", 99)
    assert received.collect(everything=False) == []
    assert received.take("a", 1), "the second of eight"
    assert received.collect(everything=False) == [("a", 2, 2)]
    assert received.take("b", 1), "100 of 400 bytes"
    assert received.collect(everything=True) == [("b", 2, 100)]
    assert received.collect(everything=True) == []


def test_link_keeps_what_has_no_credit_and_sends_it_when_credit_comes(sockets: Sockets, short_path: Path) -> None:
    clock = Clock()
    pull, endpoint = sockets.pull(f"ipc://{short_path}/p")
    link = Link(sockets.push(endpoint), clock, window=Window(3, 1000))
    got: list[bytes] = []

    def received(count: int) -> bool:
        link.flush()
        got.extend(frames[0] for frames in drain(pull))
        return len(got) >= count

    for number in range(8):
        assert link.send(f"r{number}", [b"%d" % number])
    until(lambda: received(3), what="message 3")
    assert not received(4), "three may be out"
    assert link.congested
    clock.now += 10 * STALL_SECONDS
    assert not link.stalled(), "a stage that grants nothing is slow, not broken"
    link.granted(2, 2)
    until(lambda: received(5), what="message 5")
    link.send_urgent("", [b"urgent"])
    until(lambda: received(6), what="message 6")
    assert got == [b"0", b"1", b"2", b"3", b"4", b"urgent"], "credit never waits for credit"
    link.forget("r6")
    link.granted(3, 3)
    until(lambda: received(8), what="message 8")
    assert got[6:] == [b"5", b"7"]
    assert link.backlog == 0
    assert link.backlog_bytes == 0
    assert not link.congested
    link.granted(2, 2)
    assert link.settled


def test_an_urgent_message_that_the_socket_takes_shows_that_it_takes_others(
    sockets: Sockets, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket's descriptor does not signal twice, so the first to notice sends what was refused before."""
    link = Link(sockets.push(f"ipc://{short_path}/absent"), Clock())
    link.send("r", [b"refused"])
    sent: list[bytes] = []

    def take(socket: Socket, frames: Sequence[bytes], copy: bool) -> bool:
        sent.append(frames[0])
        return True

    monkeypatch.setattr(link_module, "try_send", take)
    link.send_urgent("", [b"urgent"])
    assert sent == [b"urgent", b"refused"]


def test_an_urgent_message_that_the_socket_refused_leaves_without_credit(
    sockets: Sockets, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the credit of the other side: two stages would wait for each other."""
    link = Link(sockets.push(f"ipc://{short_path}/absent"), Clock(), window=Window(1, 1000))
    sent, takes = list[bytes](), True
    monkeypatch.setattr(link_module, "try_send", lambda socket, frames, copy: takes and not sent.append(frames[0]))
    link.send("r", [b"the only one"])
    link.send("r", [b"waits for credit"])
    takes = False
    link.send_urgent("", [b"urgent"])
    takes = True
    link.flush()
    assert sent == [b"the only one", b"urgent"]


async def test_reader_survives_a_callback_that_raises(sockets: Sockets, short_path: Path) -> None:
    pull, endpoint = sockets.pull(f"ipc://{short_path}/p")
    push = sockets.push(endpoint)
    got: list[bytes] = []
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(str(context["exception"])))

    def on_message(frames: Sequence[bytes]) -> None:
        got.append(frames[0])
        if frames[0] == b"first":
            until(lambda: sum(try_send(push, [b"more"]) for _ in range(3)) == 3, what="room for three messages")
            until(lambda: pull.poll(0), what="a message")
            time.sleep(0.1)
            pull.getsockopt(EVENTS)  # uses up the descriptor's edge: nothing will signal what waits
            raise RuntimeError("a bug")

    reader = SocketReader(pull, on_message)
    await asyncio.sleep(0.05)  # it has looked at the socket once
    until(lambda: try_send(push, [b"first"]), what="a connection")
    await eventually(lambda: len(got) == 4, what="four messages")
    assert errors == ["a bug"]
    reader.close()


FLOODED = """
import sys, time
from omni_actors.transport import sockets as transport
from omni_actors.transport.sockets import Sockets, try_send
transport.TCP_HEARTBEAT_MS = 200
sockets = Sockets()
router, _ = sockets.router(sys.argv[1])
print("bound", flush=True)
peer = router.recv_multipart()[0]
while try_send(router, [peer, bytes(4000)]):
    pass
print("full", flush=True)
sys.stdin.readline()
time.sleep(0.6)
"""
FLOODING = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.SNDHWM, 0)
socket.setsockopt(zmq.RCVHWM, 1)
socket.connect(sys.argv[1])
for _ in range(20_000):
    socket.send(bytes(1000))
sys.stdin.readline()
"""


def test_a_process_that_reads_nothing_outlives_a_flooding_peer_that_is_killed(short_path: Path) -> None:
    """libzmq would abort it at the next heartbeat."""
    arguments = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    endpoint = f"ipc://{short_path}/router"
    with subprocess.Popen([sys.executable, "-c", FLOODED, endpoint], **arguments) as flooded:
        assert flooded.stdout.readline() == "bound\n"
        with subprocess.Popen([sys.executable, "-c", FLOODING, endpoint], **arguments) as peer:
            assert flooded.stdout.readline() == "full\n"
            peer.kill()
        _, errors = flooded.communicate("\n", timeout=60)
    assert (flooded.returncode, errors) == (0, "")
