"""A block that is passed on unchanged: published once by the first of three processes, read in place by the third."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_actors.config import FlowConfig
from omni_actors.protocol.codec import BufferList, Envelope
from omni_actors.protocol.control import Hello, Peer, Peers
from omni_actors.protocol.header import Header, Limits, ReplicaId
from omni_actors.protocol.stage import Chunk
from omni_actors.protocol.tensors import DType, HostTensor
from omni_actors.stage.actor import Outgoing
from omni_actors.stage.events import Received
from omni_actors.stage.inbound import Inbound
from omni_actors.stage.inbox import Inbox
from omni_actors.stage.outbound import Outbound
from omni_actors.transport.arena import Arena, ArenaReader
from omni_actors.transport.sockets import Sockets
from tests.process.launcher import until

OWNER, MIDDLE, READER = ReplicaId("first", 0, 1), ReplicaId("second", 0, 1), ReplicaId("third", 0, 1)
AFTER = {"first": ("second",), "second": ("third",), "third": ()}
SIZE = 300_000


class Node:
    """The wire of one stage process, wired as `StageProcess` does it."""

    def __init__(self, folder: str, me: ReplicaId) -> None:
        self.me = me
        self.sockets = Sockets()
        _, control = self.sockets.router(f"ipc://{folder}/control-{me.stage}")
        _, results = self.sockets.pull(f"ipc://{folder}/results-{me.stage}")
        self.endpoint = f"ipc://{folder}/{me.stage}"
        self.arena = Arena(4 << 20)
        self.arenas = ArenaReader(lambda: self.outbound.wake())
        self.inbox = Inbox()
        self.inbound = Inbound(
            Sockets(self.sockets.context),
            me,
            control,
            self.endpoint,
            lambda inbox: Hello(1, "x", "x", 1, inbox),
            self.inbox,
            Limits(),
            1.0,
            os.getpid(),
            lambda: None,
            self.arenas,
            lambda receiver, credit: self.outbound.granted(receiver, credit),
        )
        self.outbound = Outbound(
            self.sockets,
            me,
            results,
            Limits(),
            FlowConfig(),
            self.inbox.put,
            self.arena,
            self.arenas,
            AFTER.__getitem__,
        )
        self.outbound.start()
        self.inbound.start()
        self.peer = Peer(me.stage, me.replica, me.epoch, self.endpoint, self.arena.address)
        self.received: list[Envelope] = []

    def know(self, peers: Peers) -> None:
        with self.inbox.paused():
            self.arenas.attach(
                {peer.replica_id: peer.arena for peer in peers.sources},
                {peer.replica_id: peer.arena for peer in peers.origins},
            )
        self.outbound.set_peers(peers)

    def receive(self) -> Envelope:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for event in self.inbox.take(0.1, maximum=1):
                assert isinstance(event, Received), event
                self.received.append(event.envelope)
                return event.envelope
        raise AssertionError("nothing came")

    def send(self, target: ReplicaId, data: Any, seq: int) -> None:
        buffers = BufferList()
        body = Chunk(tensors={"x": buffers.add(HostTensor(DType.U8, (len(data),), data))})
        header = Header("", "r", *msgspec.structs.astuple(self.me), seq=seq, deadline=time.time() + 60)
        self.outbound.send([Outgoing(target, header, body, buffers.buffers)])

    def close(self) -> None:
        self.received.clear()
        self.outbound.finish()
        self.outbound.join(5)
        self.inbound.finish()
        self.inbound.join(5)
        self.sockets.context.destroy(linger=0)


def child(pipe: Connection, folder: str, me: ReplicaId) -> None:
    node = Node(folder, me)
    pipe.send(node.peer)
    answers = {
        "know": node.know,
        "receive": lambda _: (node.receive().header.blocks, None)[0],
        "forward": lambda seq: node.send(READER, node.received[-1].buffers[0], seq),
        "drop": lambda _: node.received.clear(),
        "digests": lambda _: [hashlib.sha256(envelope.buffers[0]).hexdigest() for envelope in node.received],
        "counts": lambda _: node.outbound.counts(),
        "edges": lambda _: node.outbound.edges(),
        "reads": lambda replica_id: replica_id in node.outbound._mapped and OWNER in node.outbound._mapped[replica_id],
    }
    while True:
        try:
            name, argument = pipe.recv()
        except EOFError:  # the test is over
            return
        pipe.send(answers[name](argument))


class Three:
    """The owner here, the two others as processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.owner = Node(str(folder), OWNER)
        context = multiprocessing.get_context("spawn")
        self.processes, self._pipes, self.addresses = {}, {}, {OWNER: self.owner.peer}
        for replica_id in (MIDDLE, READER):
            pipe, theirs = context.Pipe()
            self.processes[replica_id] = context.Process(
                target=child, args=(theirs, str(folder), replica_id), daemon=True
            )
            self.processes[replica_id].start()
            self._pipes[replica_id] = pipe
        for replica_id in (MIDDLE, READER):
            assert self._pipes[replica_id].poll(20)
            self.addresses[replica_id] = self._pipes[replica_id].recv()
        self.announce(OWNER, MIDDLE, READER)  # who takes is heard only by those that know of it
        until(lambda: MIDDLE in self.owner.outbound._mapped, 5, "the middle one says that it reads")
        until(lambda: self.ask(MIDDLE, "reads", READER), 5, "the third one says that it reads both")

    def ask(self, replica_id: ReplicaId, name: str, argument: object = None) -> Any:
        self._pipes[replica_id].send((name, argument))
        assert self._pipes[replica_id].poll(10), f"{replica_id} does not answer"
        return self._pipes[replica_id].recv()

    def announce(self, *hops: ReplicaId, gone: ReplicaId | None = None) -> None:
        """Tell these processes who is there, in this order."""
        at = {replica_id: () if replica_id == gone else (address,) for replica_id, address in self.addresses.items()}
        known = {
            OWNER: Peers(peers=at[MIDDLE], readers=tuple(peer.replica_id for peer in at[READER])),
            MIDDLE: Peers(peers=at[READER], sources=at[OWNER]),
            READER: Peers(peers=(), sources=at[MIDDLE], origins=at[OWNER]),
        }
        for replica_id in hops:
            if replica_id == OWNER:
                self.owner.know(known[replica_id])
            else:
                self.ask(replica_id, "know", known[replica_id])

    def kill(self, replica_id: ReplicaId) -> None:
        os.kill(self.processes[replica_id].pid, signal.SIGKILL)
        self.processes[replica_id].join(5)

    def blocks(self) -> int:
        return self.owner.outbound.counts()["arena_blocks"]

    def pass_on(self, data: bytes, seq: int) -> None:
        self.owner.send(MIDDLE, data, seq)
        assert self.ask(MIDDLE, "receive")
        self.ask(MIDDLE, "forward", seq)
        (block,) = self.ask(READER, "receive")
        assert block.origin is not None
        assert block.origin.owner == OWNER

    def close(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join(5)
        self.owner.close()


@pytest.fixture
def three() -> Iterator[Three]:
    with tempfile.TemporaryDirectory(prefix="ot-", dir="/tmp") as folder:
        made = Three(Path(folder))
        try:
            yield made
        finally:
            made.close()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_published_once_and_freed_by_the_last(three: Three) -> None:
    data = os.urandom(SIZE)
    three.pass_on(data, 0)
    three.ask(MIDDLE, "drop")
    time.sleep(0.3)
    assert three.blocks() == 1, "the third one reads it"
    middle = three.ask(MIDDLE, "counts")
    assert (middle["total_forwarded"], middle["arena_blocks"], middle["arena_bytes"]) == (1, 1, 0)
    edge = three.ask(MIDDLE, "edges")["third/0"]
    assert (edge.messages, edge.shared_bytes) == (1, SIZE), "what is forwarded goes through shared memory, too"
    assert edge.bytes < 1000
    assert three.ask(READER, "digests") == [digest(data)]
    three.ask(READER, "drop")
    until(lambda: three.blocks() == 0, 5, "the owner has it back")
    assert three.owner.outbound.counts()["total_blocks"] == 1
    middle, third = three.ask(MIDDLE, "counts"), three.ask(READER, "counts")
    assert (middle["arena_blocks"], middle["leases"], third["leases"]) == (0, 0, 0)


@pytest.mark.parametrize("first", [OWNER, READER], ids=["owner first", "reader first"])
def test_death_of_the_middle_one(three: Three, first: ReplicaId) -> None:
    """Whoever hears of it first: what the third one reads stays as it is, and all else is freed at once."""
    data = os.urandom(SIZE)
    three.pass_on(data, 0)
    three.owner.send(MIDDLE, os.urandom(SIZE), 1)  # not passed on
    three.ask(MIDDLE, "receive")
    three.ask(MIDDLE, "drop") if first == READER else None
    three.kill(MIDDLE)
    assert three.blocks() >= 1
    second = READER if first == OWNER else OWNER
    three.announce(first, gone=MIDDLE)
    time.sleep(0.3)
    three.announce(second, gone=MIDDLE)
    until(lambda: three.blocks() == 1, 5, "only the one in use is held")
    arena = three.owner.arena
    others = [arena.publish(bytes(SIZE), READER, 1e12) for _ in range(20)]
    assert None in others, "the arena is full"
    assert three.ask(READER, "digests") == [digest(data)], "nobody wrote over it"
    three.ask(READER, "drop")
    until(lambda: three.blocks() == sum(block is not None for block in others), 5, "given back to the owner")


def test_death_of_the_third_one(three: Three) -> None:
    three.pass_on(os.urandom(SIZE), 0)
    three.ask(MIDDLE, "drop")
    three.kill(READER)
    three.announce(MIDDLE, OWNER, gone=READER)
    until(lambda: three.blocks() == 0, 5, "freed by the middle one")
    assert three.ask(MIDDLE, "counts")["arena_blocks"] == 0


def test_death_of_both(three: Three) -> None:
    three.pass_on(os.urandom(SIZE), 0)
    three.kill(MIDDLE)
    three.announce(OWNER, READER, gone=MIDDLE)
    until(lambda: three.blocks() == 1, 5, "the third one has said what it holds")
    three.kill(READER)
    three.owner.know(Peers(peers=()))
    until(lambda: three.blocks() == 0, 5, "nobody is left")
