"""The thread that owns a stage's inbound sockets, the inbox that two threads read, and the end of a stage's process."""

from __future__ import annotations

import logging
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_actors.protocol.codec import Decoder, encode
from omni_actors.protocol.fields import Header, Limits, ReplicaId
from omni_actors.protocol.messages import (
    CoordinatorToStage,
    Loading,
    Ready,
    Reregister,
    Sample,
    Shutdown,
    Snapshot,
    StageToCoordinator,
    Welcome,
)
from omni_actors.stage import inbound
from omni_actors.stage.echo import EchoEngine
from omni_actors.stage.inbound import Event, Inbox, Lost, Stop
from omni_actors.stage.process import StageProcess, build_engine
from omni_actors.stage.session import ReplicaSpec
from omni_actors.transport.sockets import HIGH_WATER_MARK, Socket, Sockets, drain, try_send
from tests.support.builders import pipeline
from tests.support.stage import inbound_of
from tests.support.waiting import PATIENCE, until

IDENTITY = ReplicaId("thinker", 0, 5)
NAME = b"thinker/0/5"


class Harness:
    """An `Inbound` thread and the coordinator's end of its control connection."""

    def __init__(self, folder: Path, inbox: str = "inbox", limits: Limits | None = None) -> None:
        self.sockets = Sockets()
        self.control, endpoint = self.sockets.router(f"ipc://{folder}/control")
        self.inbox = Inbox()
        self.inbound = inbound_of(
            Sockets(), IDENTITY, endpoint, f"ipc://{folder}/{inbox}", self.inbox, limits=limits or Limits()
        )
        self.inbound.start()

    def await_hello(self) -> list:
        """The next message to the coordinator, first its hello; the connection's identity is the first frame."""
        until(lambda: self.control.poll(0))
        return self.control.recv_multipart()

    def tell(self, body: CoordinatorToStage) -> None:
        until(lambda: try_send(self.control, [NAME, *encode(Header(""), body)]))

    def next(self, seconds: float = 5.0) -> Event | None:
        """The next event; `None` if none comes in time."""
        deadline = time.monotonic() + seconds * PATIENCE
        while (left := deadline - time.monotonic()) > 0:
            for event in self.inbox.take(left, maximum=1):
                return event
        return None

    def close(self) -> None:
        self.inbound.finish()
        self.inbound.join(5 * PATIENCE)
        assert not self.inbound.is_alive()
        self.sockets.context.destroy(linger=0)


Start = Callable[..., Harness]


@pytest.fixture
def start(short_path: Path) -> Iterator[Start]:
    made: list[Harness] = []

    def one(**options: Any) -> Harness:
        made.append(Harness(short_path, **options))
        return made[-1]

    yield one
    for harness in made:
        harness.close()


def test_figures_over_the_limit_are_left_out_and_other_messages_go_on(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline whose limit is too small for a stage's metrics alone is served all the same."""
    monkeypatch.setattr(inbound, "MAXIMUM_POLL_SECONDS", 600.0)  # what is told wakes the thread
    logging.getLogger("omni_actors").propagate = True
    harness = start(limits=Limits(body_bytes=1000))
    harness.await_hello()
    harness.inbound.tell(Snapshot(samples=tuple(Sample("omni_x", ("a" * 100,), 1.0) for _ in range(20))))
    harness.inbound.tell(Ready(seconds=1.0))
    _, *frames = harness.await_hello()
    assert isinstance(Decoder(StageToCoordinator).decode(frames).body, Ready)
    assert "metrics are not sent" in caplog.text
    assert harness.next(0.1) is None


def test_what_the_coordinator_does_not_take_now_comes_when_it_reads(start: Start) -> None:
    """More than zmq keeps, from a stage that was not welcomed, so that no heartbeat is among it."""
    harness = start()
    harness.await_hello()
    phases = [f"{number:250}" for number in range(6 * HIGH_WATER_MARK)]
    for phase in phases:
        harness.inbound.tell(Loading(phase))
    harness.tell(Shutdown())
    assert harness.next() == Shutdown()  # the thread has passed on all that came before
    told: list[str] = []

    def heard() -> bool:
        for _, *frames in drain(harness.control):
            told.append(Decoder(StageToCoordinator).decode(frames).body.phase)
        return len(told) >= len(phases)

    until(heard)
    assert told == phases


def test_a_coordinator_that_dies_or_forgets_ends_the_session(start: Start) -> None:
    harness = start()
    harness.await_hello()
    harness.tell(Reregister())
    assert harness.next() == Lost("the coordinator does not know this replica")
    harness.control.close()
    assert harness.next() == Lost("the coordinator is not connected any more")


def test_last_words_of_a_coordinator_count_though_it_has_left(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both come at once, and just after the control connection was looked at."""
    harness = start()
    harness.await_hello()
    receive = harness.inbound._receive_control

    def speak_and_leave(control: Socket) -> None:
        receive(control)
        if not harness.control.closed:
            harness.tell(Shutdown(reason="the launcher stops"))
            harness.control.close()
            time.sleep(0.2)

    monkeypatch.setattr(harness.inbound, "_receive_control", speak_and_leave)
    assert harness.next() == Shutdown(reason="the launcher stops")
    assert harness.next() == Lost("the coordinator is not connected any more")


def test_a_thread_that_fails_says_so(start: Start) -> None:
    harness = start(inbox="missing/inbox")
    stop = harness.next()
    assert isinstance(stop, Stop)
    assert stop.failed
    assert "Cannot bind" in stop.reason


# -- the inbox ---------------------------------------------------------------------------------------------------------


class TwoReaders:
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
def readers(short_path: Path) -> Iterator[TwoReaders]:
    made = TwoReaders(short_path)
    yield made
    made.close()


def collect(readers: TwoReaders, count: int, timeout: float = 0.5) -> list[str]:
    got: list[str] = []
    deadline = time.monotonic() + 10
    while len(got) < count:
        assert time.monotonic() < deadline, f"{len(got)} of {count}"
        got += readers.take(timeout)
    return got


def test_order_is_kept_whoever_reads(readers: TwoReaders) -> None:
    readers.start()
    sender = threading.Thread(target=readers.send, args=range(10_000))
    sender.start()
    chance = random.Random(5)
    got = readers.take(0)
    until(lambda: readers.reads > 0)  # while this thread does something else
    deadline = time.monotonic() + 20
    while len(got) < 10_000 and time.monotonic() < deadline:
        got += readers.take(chance.choice((0, 0.001, 0.1)), chance.choice((1, 10, 10**6)))
        if chance.random() < 0.02:
            time.sleep(0.002)
    sender.join()
    assert got == [str(number) for number in range(10_000)]
    assert readers.reads > 0


@pytest.mark.parametrize("timeout", [0.0, 0.5], ids=["computing", "waiting"])
def test_a_full_inbox_stops_the_reading_and_loses_nothing(
    readers: TwoReaders, monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    monkeypatch.setattr(inbound, "LIMIT", 10)
    monkeypatch.setattr(inbound, "BATCH", 5)
    readers.start()
    assert readers.take(0) == []
    readers.send(*range(200))
    time.sleep(0.2)
    reads = readers.reads
    assert 10 <= len(readers.inbox) < 15
    time.sleep(0.2)
    assert readers.reads - reads <= 1, "it does not spin"
    assert collect(readers, 200, timeout) == [str(number) for number in range(200)]


def test_what_the_other_thread_reads_wakes_a_main_thread_that_waits(readers: TwoReaders) -> None:
    """It may have been on its way to the socket when the main thread went to sleep there."""
    readers.inbox._waiting = True
    readers.send("late")
    until(lambda: readers.inbox.read() or len(readers.inbox))
    assert select.select([readers.inbox._wakeup.fileno()], [], [], 0)[0]
    readers.inbox._waiting = False
    assert readers.take(0) == ["late"]


@pytest.fixture
def spec(short_path: Path) -> ReplicaSpec:
    return ReplicaSpec(
        pipeline_json=msgspec.json.encode(pipeline()),
        stage="thinker",
        replica=0,
        epoch=1,
        ordered=time.monotonic(),
        control_endpoint=f"ipc://{short_path}/control",
        inbox_endpoint=f"ipc://{short_path}/inbox",
        devices=(),
        threads=0,
        launcher_pid=os.getpid(),
        log_file=str(short_path / "log"),
        run_dir=str(short_path),
        run_dir_is_temporary=False,
    )


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """A stage's process sets its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Coordinator:
    """Welcomes a stage and shuts it down at once."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._results = f"ipc://{spec.run_dir}/results"
        self.sockets = Sockets()
        self._control, _ = self.sockets.router(spec.control_endpoint)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        until(lambda: self._control.poll(0))
        name = self._control.recv_multipart()[0]
        for body in (Welcome(results=self._results), Shutdown(reason="the launcher stops")):
            self._control.send_multipart([name, *encode(Header(""), body)])

    def leave(self) -> None:
        """Close the connection once everything has been said."""
        self._thread.join()
        self._control.close()


def test_an_engine_that_ends_with_its_process_is_not_shut_down_before(
    spec: ReplicaSpec, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending(EchoEngine):
        ends_with_process = True

    stage = msgspec.structs.replace(pipeline().stage("thinker"), engine={"fail_shutdown": "it was shut down"})
    monkeypatch.setattr("omni_actors.stage.process.build_engine", lambda *arguments: Ending(stage))
    process = StageProcess(spec)
    coordinator = Coordinator(spec)
    assert process.run() == 0
    coordinator.leave()
    coordinator.sockets.context.destroy(linger=0)
    assert "it was shut down" not in caplog.text


def test_a_coordinator_that_ends_takes_the_stage_along(
    spec: ReplicaSpec, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so and leaves while the engine loads: the stage sees both at once, and does not register again."""
    logging.getLogger("omni_actors").propagate = True
    caplog.set_level(logging.INFO, "omni_actors")

    def build_slowly(*arguments: Any) -> EchoEngine:
        coordinator.leave()
        time.sleep(0.2)
        return build_engine(*arguments)

    process = StageProcess(spec)
    monkeypatch.setattr("omni_actors.stage.process.build_engine", build_slowly)
    coordinator = Coordinator(spec)
    assert process.run() == 0
    coordinator.sockets.context.destroy(linger=0)
    assert "stopping: the launcher stops" in caplog.text
    assert "registering again" not in caplog.text
