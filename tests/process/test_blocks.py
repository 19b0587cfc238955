"""Blocks in shared memory between three processes: published once, read in place, freed when readers end or die."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from omni_actors.config import FlowConfig
from omni_actors.protocol.codec import BufferList, Envelope
from omni_actors.protocol.fields import DType, Header, HostTensor, Limits, ReplicaId
from omni_actors.protocol.messages import Chunk, Hello, Peer, Peers
from omni_actors.stage.actor import Outgoing
from omni_actors.stage.inbound import Inbound, Inbox, Received
from omni_actors.stage.outbound import Outbound
from omni_actors.transport.arena import Arena, ArenaReader
from omni_actors.transport.sockets import Sockets
from tests.support.waiting import until

OWNER, FIRST, SECOND = ReplicaId("owner", 0, 1), ReplicaId("first", 0, 1), ReplicaId("second", 0, 1)
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
            lambda inbox, remote: Hello(1, "x", "x", 1, inbox),
            self.inbox,
            Limits(),
            1.0,
            os.getpid(),
            lambda: None,
            self.arenas,
            lambda receiver, credit: self.outbound.granted(receiver, credit),
        )
        self.outbound = Outbound(
            self.sockets, me, results, Limits(), FlowConfig(), self.inbox.put, self.arena, self.arenas
        )
        self.outbound.start()
        self.inbound.start()
        self.peer = Peer(me.stage, me.replica, me.epoch, self.endpoint, self.arena.address)
        self.received: list[Envelope] = []

    def know(self, peers: Peers) -> None:
        with self.inbox.paused():
            self.arenas.attach({peer.replica_id: peer.arena for peer in peers.sources})
        self.outbound.set_peers(peers)

    def receive(self) -> Envelope:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for event in self.inbox.take(0.1, maximum=1):
                assert isinstance(event, Received), event
                self.received.append(event.envelope)
                return event.envelope
        raise AssertionError("nothing came")

    def send(self, data: bytes, seq: int, *targets: ReplicaId) -> None:
        buffers = BufferList()
        body = Chunk(tensors={"x": buffers.add(HostTensor(DType.U8, (len(data),), data))})
        header = Header("", "r", *msgspec.structs.astuple(self.me), seq=seq, deadline=time.time() + 60)
        self.outbound.send([Outgoing(target, header, body, buffers.buffers) for target in targets])

    def close(self) -> None:
        self.received.clear()
        self.outbound.finish()
        self.outbound.join(5)
        self.inbound.finish()
        self.inbound.join(5)
        self.sockets.context.destroy(linger=0)


def child(pipe: Connection, folder: str, me: ReplicaId, owner: Peer) -> None:
    node = Node(folder, me)
    pipe.send(node.peer)
    answers = {
        "know": lambda _: node.know(Peers(peers=(), sources=(owner,))),
        "receive": lambda _: node.receive().header.blocks,
        "drop": lambda _: node.received.clear(),
        "digests": lambda _: [hashlib.sha256(envelope.buffers[0]).hexdigest() for envelope in node.received],
        "counts": lambda _: node.outbound.counts(),
    }
    while True:
        try:
            name = pipe.recv()
        except EOFError:  # the test is over
            return
        pipe.send(answers[name](None))


class Three:
    """The owner here, the two others as processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.owner = Node(str(folder), OWNER)
        context = multiprocessing.get_context("spawn")
        self.processes, self._pipes, self.peers = {}, {}, {}
        for replica_id in (FIRST, SECOND):
            pipe, theirs = context.Pipe()
            self.processes[replica_id] = context.Process(
                target=child, args=(theirs, str(folder), replica_id, self.owner.peer), daemon=True
            )
            self.processes[replica_id].start()
            self._pipes[replica_id] = pipe
        for replica_id in (FIRST, SECOND):
            assert self._pipes[replica_id].poll(20)
            self.peers[replica_id] = self._pipes[replica_id].recv()
        self.announce(FIRST, SECOND)
        for replica_id in (FIRST, SECOND):
            self.ask(replica_id, "know")
        until(lambda: all(self.reads_blocks(replica_id) for replica_id in (FIRST, SECOND)), 5, "both read the arena")
        until(lambda: self.blocks() == 0, 5, "all of it is returned")

    def reads_blocks(self, replica_id: ReplicaId) -> bool:
        self.owner.send(bytes(SIZE), 0, replica_id)
        blocks = self.ask(replica_id, "receive")
        self.ask(replica_id, "drop")
        return bool(blocks)

    def ask(self, replica_id: ReplicaId, name: str) -> Any:
        self._pipes[replica_id].send(name)
        assert self._pipes[replica_id].poll(10), f"{replica_id} does not answer"
        return self._pipes[replica_id].recv()

    def announce(self, *alive: ReplicaId) -> None:
        """Tell the owner which readers there are."""
        self.owner.know(Peers(peers=tuple(self.peers[replica_id] for replica_id in alive)))

    def kill(self, replica_id: ReplicaId) -> None:
        psutil.Process(self.processes[replica_id].pid).kill()
        self.processes[replica_id].join(5)

    def blocks(self) -> int:
        return self.owner.outbound.counts()["arena_blocks"]

    def publish(self, data: bytes, *targets: ReplicaId) -> None:
        self.owner.send(data, 0, *targets)
        for target in targets:
            assert self.ask(target, "receive"), "it came as a frame"

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


def test_published_once_for_both_and_freed_by_the_last(three: Three) -> None:
    data = os.urandom(SIZE)
    before = three.owner.outbound.counts()["total_blocks"]
    three.publish(data, FIRST, SECOND)
    assert three.owner.outbound.counts()["total_blocks"] == before + 1
    three.ask(FIRST, "drop")
    until(lambda: three.ask(FIRST, "counts")["leases"] == 0, 5, "the first one has given it back")
    assert three.blocks() == 1, "the second one still reads it"
    edge = three.owner.outbound.edges()["second/0"]
    assert edge.shared_bytes % SIZE == 0
    assert edge.shared_bytes > 0
    assert three.ask(SECOND, "digests") == [digest(data)]
    three.ask(SECOND, "drop")
    until(lambda: three.blocks() == 0, 5, "the owner has it back")
    until(lambda: three.ask(SECOND, "counts")["leases"] == 0, 5, "the second one, too")


def test_death_of_a_reader_frees_only_what_it_alone_held(three: Three) -> None:
    """What the living one reads stays as it is, even when all the rest of the arena is written again."""
    data = os.urandom(SIZE)
    three.publish(data, FIRST, SECOND)
    three.publish(os.urandom(SIZE), FIRST)
    assert three.blocks() == 2
    three.kill(FIRST)
    assert three.blocks() == 2, "the owner has not heard of it yet"
    three.announce(SECOND)
    until(lambda: three.blocks() == 1, 5, "only the one in use is held")
    arena = three.owner.arena
    others = [arena.reserve(SIZE, SECOND, 1e12) for _ in range(20)]
    for block in others:
        if block is not None:
            arena.write(block, bytes(SIZE))
    assert None in others, "the arena is full"
    assert three.ask(SECOND, "digests") == [digest(data)], "it was written over"
    three.ask(SECOND, "drop")
    until(lambda: three.blocks() == sum(block is not None for block in others), 5, "returned to the owner")


def test_death_of_both_readers_frees_everything(three: Three) -> None:
    three.publish(os.urandom(SIZE), FIRST, SECOND)
    three.kill(FIRST)
    three.kill(SECOND)
    three.announce()
    until(lambda: three.blocks() == 0, 5, "no reader is left")
