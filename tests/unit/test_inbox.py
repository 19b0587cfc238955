"""One socket, two threads that read it in turn: order, wake-ups, and that no message is left lying. Real sockets."""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_actors.stage import inbound as inbox_module
from omni_actors.stage.inbound import Inbox, Stop
from omni_actors.transport.sockets import Socket, Sockets, try_send
from tests.support.waiting import until


class Harness:
    """An inbox, its sender, and on demand a thread that does what the inbound thread does."""

    def __init__(self, folder: Path) -> None:
        self.sockets = Sockets()
        socket, endpoint = self.sockets.pull(f"ipc://{folder}/inbox")
        self.inbox = Inbox()
        self.inbox.open(socket, lambda frames: Stop(bytes(frames[0]).decode()))
        self.push: Socket = self.sockets.push(endpoint)
        self.reads = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        until(lambda: try_send(self.push, [b"0"]))
        until(lambda: self.take(1.0) == ["0"])

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            if self.inbox.epoll.poll(0.05):
                self.inbox.read()
                self.reads += 1

    def send(self, *names: object) -> None:
        for name in names:
            until(lambda name=name: try_send(self.push, [str(name).encode()]))

    def take(self, timeout: float, maximum: int = 10**6) -> list[str]:
        return [event.reason for event in self.inbox.take(timeout, maximum)]

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        self.inbox.close()
        self.sockets.context.destroy(linger=0)


@pytest.fixture
def harness(short_path: Path) -> Iterator[Harness]:
    made = Harness(short_path)
    yield made
    made.close()


def collect(harness: Harness, count: int, timeout: float = 0.5) -> list[str]:
    got: list[str] = []
    deadline = time.monotonic() + 10
    while len(got) < count:
        assert time.monotonic() < deadline, f"{len(got)} of {count}"
        got += harness.take(timeout)
    return got


def test_the_other_thread_reads_while_the_main_thread_computes(harness: Harness) -> None:
    harness.start()
    assert harness.take(0) == []
    harness.send(1, 2, 3)
    until(lambda: len(harness.inbox) == 3)
    assert harness.take(0, maximum=2) == ["1", "2"]
    assert harness.take(0) == ["3"]


def test_order_is_kept_whoever_reads(harness: Harness) -> None:
    harness.start()
    sender = threading.Thread(target=harness.send, args=range(20_000))
    sender.start()
    chance = random.Random(5)
    got = harness.take(0)
    until(lambda: harness.reads > 0)  # while this thread does something else
    deadline = time.monotonic() + 20
    while len(got) < 20_000 and time.monotonic() < deadline:
        got += harness.take(chance.choice((0, 0.001, 0.1)), chance.choice((1, 10, 10**6)))
        if chance.random() < 0.02:
            time.sleep(0.002)
    sender.join()
    assert got == [str(number) for number in range(20_000)]
    assert harness.reads > 0


@pytest.mark.parametrize("timeout", [0.0, 0.5], ids=["computing", "waiting"])
def test_a_full_inbox_stops_the_reading_and_loses_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    monkeypatch.setattr(inbox_module, "LIMIT", 10)
    monkeypatch.setattr(inbox_module, "BATCH", 5)
    harness.start()
    assert harness.take(0) == []
    harness.send(*range(200))
    time.sleep(0.2)
    reads = harness.reads
    assert 10 <= len(harness.inbox) < 15
    time.sleep(0.2)
    assert harness.reads - reads <= 1, "it does not spin"
    assert collect(harness, 200, timeout) == [str(number) for number in range(200)]


def test_what_the_other_thread_reads_wakes_a_main_thread_that_waits(harness: Harness) -> None:
    """It may have been on its way to the socket when the main thread went to sleep there."""
    harness.inbox._waiting = True
    harness.send("late")
    until(lambda: harness.inbox.read() or len(harness.inbox))
    assert select.select([harness.inbox._wakeup.fileno()], [], [], 0)[0]
    harness.inbox._waiting = False
    assert harness.take(0) == ["late"]
