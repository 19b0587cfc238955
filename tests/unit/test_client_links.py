"""What waits for clients is bounded, whatever they ask and however little they read."""

from __future__ import annotations

import asyncio
import collections
import time
from pathlib import Path

import msgspec
import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.config import FlowConfig
from omni_actors.coordinator.core.instructions import ToClient
from omni_actors.coordinator.links import ClientLinks
from omni_actors.protocol.codec import Decoder, encode
from omni_actors.protocol.fields import Header
from omni_actors.protocol.messages import ClientToCoordinator, Credit, Describe, Observation
from omni_actors.transport.link import Traffic
from omni_actors.transport.sockets import Socket, Sockets, drain, try_send
from tests.support.builders import pipeline
from tests.support.requests import ready
from tests.support.waiting import eventually, until

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
        self.links = ClientLinks(
            self.router, config, ready(), lambda _: None, self.gone.append, self.sent, self.dropped
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
