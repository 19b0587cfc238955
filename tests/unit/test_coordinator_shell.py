"""The shell of the coordinator: what waits for its peers is bounded; it ends if it cannot carry out a decision."""

from __future__ import annotations

import asyncio
import collections
import os
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import msgspec
import pytest

import omni_actors
from omni_actors.client import AsyncOmniClient
from omni_actors.config import FlowConfig
from omni_actors.coordinator import CoordinatorSpec
from omni_actors.coordinator.core.instructions import ToClient
from omni_actors.coordinator.links import ClientLinks, ControlLinks
from omni_actors.errors import InvalidPayload
from omni_actors.protocol.codec import Decoder, encode
from omni_actors.protocol.fields import PROTOCOL_VERSION, Header, Limits, ReplicaId, identity_of
from omni_actors.protocol.messages import (
    Abort,
    ClientToCoordinator,
    CoordinatorToStage,
    Credit,
    Describe,
    NodeHello,
    Observation,
    Shutdown,
)
from omni_actors.transport.link import Traffic
from omni_actors.transport.sockets import Socket, Sockets, drain, try_send
from tests.support.builders import pipeline
from tests.support.requests import ask, ready
from tests.support.waiting import PATIENCE, eventually, until

WINDOW, OUTBOX = 256, 100


class Answers:
    """A coordinator's links to clients, which answers every question with the same text."""

    def __init__(self, sockets: Sockets, folder: Path) -> None:
        self.router, self.endpoint = sockets.router(f"ipc://{folder}/clients")
        self._sockets = sockets
        flow = FlowConfig(client_window_messages=WINDOW, client_messages=OUTBOX)
        config = msgspec.structs.replace(pipeline(), flow=flow)
        self.sent, self.dropped = Traffic(), collections.Counter[str]()
        self.gone: list[bytes] = []
        self.state = ready()
        self.links = ClientLinks(
            self.router, config, self.state, lambda _: None, self.gone.append, self.sent, self.dropped
        )

    def connect(self, name: bytes) -> Socket:
        dealer, monitor = self._sockets.dealer(self.endpoint, name)
        monitor.close()
        try_send(dealer, [b"hello"])
        until(lambda: self.router.poll(0), what="the message")
        _, descriptor, client, _ = self._sockets.receive_from_client(self.router)
        self.links.heard(client, descriptor)
        return dealer

    def answer(self, name: bytes, count: int) -> None:
        for number in range(count):
            self.links.send(ToClient(name, str(number), 0, Observation(text="x" * 100)))


@pytest.fixture
def answers(sockets: Sockets, short_path: Path) -> Answers:
    return Answers(sockets, short_path)


def test_a_client_that_asks_and_does_not_read_holds_no_more_than_one_window_and_one_outbox(answers: Answers) -> None:
    alice = answers.connect(b"alice")
    answers.answer(b"alice", 20 * (WINDOW + OUTBOX))
    assert answers.sent.messages == WINDOW
    assert answers.dropped["client_messages"] > 10
    read: list[list] = []
    until(lambda: read.extend(drain(alice)) or len(read) == WINDOW, what="its window")
    answers.links.granted(b"alice", Credit(messages=WINDOW, bytes=1 << 20))
    assert WINDOW < answers.sent.messages <= WINDOW + OUTBOX, "it reads again, and gets what still waits"
    answers.answer(b"alice", 1)
    until(lambda: drain(alice), what="more")


def test_more_may_wait_for_a_client_with_many_requests(answers: Answers) -> None:
    """They all go on at once when another coordinator has come."""
    alice = answers.connect(b"alice")
    for number in range(30):
        ask(answers.state, f"r{number}", b"alice")
    answers.answer(b"alice", WINDOW + 3 * OUTBOX)
    assert not answers.dropped
    answers.answer(b"alice", 1)
    assert answers.dropped == {"client_slow": 1}
    alice.close(linger=0)


def test_a_client_with_a_new_connection_does_not_owe_what_was_lost_with_the_one_before(answers: Answers) -> None:
    before = answers.connect(b"alice")
    answers.answer(b"alice", WINDOW + 10)
    before.close(linger=0)
    after = answers.connect(b"alice")
    read: list[list] = []
    until(lambda: read.extend(drain(after)) or len(read) == 10, what="what waited for credit")


async def test_a_client_says_on_a_new_connection_that_it_is_still_there(sockets: Sockets, short_path: Path) -> None:
    """Else it would count as gone until its next question. What it waits for it asks again: that may be lost."""
    endpoint = f"ipc://{short_path}/clients"
    before, _ = sockets.router(endpoint)
    async with AsyncOmniClient(endpoint) as client:
        question = asyncio.create_task(client.describe(timeout=60))
        (first,) = await eventually(lambda: drain(before), what="its question")
        before.close(linger=0)
        after, _ = sockets.router(endpoint)
        came: list = []
        await eventually(lambda: came.extend(drain(after)) or len(came) >= 2, what="its announcement and question")
        assert {name for name, *_ in came} == {first[0]}
        assert [Decoder(ClientToCoordinator).decode(frames).body for _, *frames in came] == [Credit(), Describe()]
        question.cancel()
        await asyncio.gather(question, return_exceptions=True)


@pytest.mark.parametrize("turns", range(8))
async def test_a_question_that_is_given_up_stays_so_if_its_answer_comes_at_that_moment(
    sockets: Sockets, short_path: Path, turns: int
) -> None:
    """Else a client that closes while it asks for its requests would go on asking, and its end would wait for that."""
    router, endpoint = sockets.router(f"ipc://{short_path}/clients")
    async with AsyncOmniClient(endpoint) as client:
        question = asyncio.create_task(client.metrics())
        ((name, *frames),) = await eventually(lambda: drain(router), what="its question")
        token = Decoder(ClientToCoordinator).decode(frames).header.request_id
        try_send(router, [name, *encode(Header("", request_id=token), Observation(text="x"))])
        time.sleep(0.05)  # noqa: ASYNC251 - the answer has come, and this client has not looked yet
        for _ in range(turns):
            await asyncio.sleep(0)
        given_up = question.cancel()
        await asyncio.wait([question])
        assert question.cancelled() == given_up


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


BROKEN = """
import sys
from omni_actors.coordinator import process
from omni_actors.coordinator.core.fleet import Fleet
from omni_actors.coordinator.core.requests import RequestMachine
from omni_actors.coordinator.links import ControlLinks

def broken(self, *_):
    raise RuntimeError("this is broken")

{} = broken
sys.exit(process.main())
"""


@pytest.mark.parametrize("method", ["Fleet.tick", "RequestMachine.abort", "ControlLinks.send"])
async def test_a_tick_a_message_or_an_instruction_that_fails_ends_the_process(
    method: str, short_path: Path, sockets: Sockets
) -> None:
    spec = CoordinatorSpec(
        pipeline=pipeline(),
        **{name: f"ipc://{short_path}/{name}" for name in ("client", "control", "results")},
        launcher_pid=os.getpid(),
        run_dir=str(short_path),
        run_dir_is_temporary=False,
        began=time.monotonic(),
        started=time.monotonic(),
    )
    command = (sys.executable, "-c", BROKEN.format(method))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert process.stdin
    assert process.stdout
    process.stdin.write(msgspec.json.encode(spec))
    process.stdin.write_eof()
    async with asyncio.timeout(30 * PATIENCE):
        assert b"listening" in await process.stdout.readline()
        node, _ = sockets.dealer(spec.control, identity_of(0))  # before it, no client is served
        digest = spec.pipeline.digest()
        hello = NodeHello(PROTOCOL_VERSION, omni_actors.__version__, digest, (), True, 0)
        node.send_multipart(encode(Header("", replica=0), hello))
        client, _ = sockets.dealer(spec.client, b"a client")
        client.send_multipart(encode(Header("", "r1"), Abort()))
        out, errors = await process.communicate()
    assert process.returncode == 4
    assert b"finished" not in out, "that would be an orderly end"
    assert b"this is broken" in errors
