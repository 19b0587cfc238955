"""Credit and links that wait for it: real sockets inside one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from omni_actors.transport import link as link_module
from omni_actors.transport.link import STALL_SECONDS, Link, ReceivedCredit, Window
from omni_actors.transport.sockets import Socket, Sockets, drain
from tests.support.clock import Clock
from tests.support.waiting import until


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


def test_an_urgent_message_leaves_at_once_whatever_waits_for_credit(sockets: Sockets, short_path: Path) -> None:
    """No one flushes or grants here: an abort behind a backlog would arrive too late to be of use."""
    pull, endpoint = sockets.pull(f"ipc://{short_path}/p")
    link = Link(sockets.push(endpoint), Clock(), window=Window(1, 1000))
    got: list[bytes] = []

    def came(count: int) -> bool:
        got.extend(bytes(frames[0]) for frames in drain(pull))
        return len(got) >= count

    link.send("r", [b"0"])
    until(lambda: link.flush() or came(1), what="the first message")
    for number in range(1, 4):
        link.send("r", [b"%d" % number])
    link.send_urgent("", [b"urgent"])
    until(lambda: came(2), what="the urgent message")
    assert got == [b"0", b"urgent"]
    assert link.backlog == 3


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


def test_client_that_grants_nothing_counts_as_stalled(sockets: Sockets, short_path: Path) -> None:
    clock = Clock()
    _, endpoint = sockets.pull(f"ipc://{short_path}/p")
    link = Link(sockets.push(endpoint), clock, 5.0, Window(1, 1000), needs_credit=True)
    link.send("r", [b"x"])

    def is_out() -> bool:
        link.flush()
        return link.window.messages_out == 1

    until(is_out, what="a message that uses up the window")
    link.send("r", [b"y"])
    assert not link.stalled()
    clock.now += 5.1
    assert link.stalled()
