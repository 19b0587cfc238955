"""The thread that sends: credit, fan-out by one block, peers that come late, restart or vanish. Real sockets."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_actors.config import FlowConfig
from omni_actors.errors import StageLost
from omni_actors.protocol.codec import BufferList, Decoder
from omni_actors.protocol.fields import DType, Header, HostTensor, Limits, ReplicaId
from omni_actors.protocol.messages import Chunk, Credit, FromStage, IntoStage, Peer, Peers, TextDelta
from omni_actors.stage.inbound import Event, Rejected, Undelivered
from omni_actors.stage.outbound import Outbound, Outgoing
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.metrics import Meters, Metric
from omni_actors.transport.arena import Arena, ArenaReader
from omni_actors.transport.sockets import Sockets, drain
from tests.support.waiting import PATIENCE, until

ME = ReplicaId("thinker", 0, 5)
TALKER, OTHER = ReplicaId("talker", 0, 5), ReplicaId("other", 0, 5)
LARGE = bytes(range(256)) * 400


class Harness:
    """An `Outbound` and the sockets of those that it sends to."""

    def __init__(self, folder: Path, flow: FlowConfig | None = None, limits: Limits | None = None) -> None:
        self.folder = folder
        self.sockets = Sockets()
        self.results, results = self.sockets.pull(f"ipc://{folder}/results")
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.arena = Arena(1 << 20)
        self.reader = ArenaReader(lambda: None)
        self.reader.attach({ME: self.arena.address})
        self.outbound = Outbound(
            Sockets(self.sockets.context),
            ME,
            limits or Limits(),
            flow or FlowConfig(),
            self.events.put,
            self.arena,
            ArenaReader(lambda: None),
        )
        self.outbound.attach(results)
        self.outbound.start()
        self.got: dict[ReplicaId, list] = {}
        self.inboxes: dict[ReplicaId, object] = {}

    def bind(self, *replicas: ReplicaId) -> None:
        for replica_id in replicas:
            self.inboxes[replica_id] = self.sockets.pull(self.endpoint(replica_id))[0]
            self.got[replica_id] = []

    def endpoint(self, replica_id: ReplicaId) -> str:
        return f"ipc://{self.folder}/{replica_id.stage}-{replica_id.replica}-{replica_id.epoch}"

    def peers(self, *replicas: ReplicaId, sources: tuple[ReplicaId, ...] = ()) -> None:
        made = [tuple(Peer(replica_id, self.endpoint(replica_id)) for replica_id in of) for of in (replicas, sources)]
        self.outbound.set_peers(Peers(peers=made[0], sources=made[1]))

    def receive(self, replica_id: ReplicaId, count: int) -> list:
        decoder: Decoder[IntoStage] = Decoder(IntoStage, None, self.reader.open)

        def enough() -> bool:
            self.got[replica_id] += [decoder.decode(frames) for frames in drain(self.inboxes[replica_id])]
            return len(self.got[replica_id]) >= count

        until(enough)
        return self.got[replica_id]

    def measured(self, metric: Metric) -> dict[str, float]:
        """A metric of all edges, by receiver."""
        self.outbound.measure(meters := Meters())
        return {target: value for (name, (_, target)), value in meters.values.items() if name == metric.name}

    def close(self) -> None:
        self.outbound.finish()
        self.outbound.join(5 * PATIENCE)
        assert not self.outbound.is_alive()
        self.sockets.context.destroy(linger=0)
        self.arena.close()


Start = Callable[..., Harness]


@pytest.fixture
def start(short_path: Path) -> Iterator[Start]:
    """Starts a stage that sends, and replicas that it knows."""
    made: list[Harness] = []

    def one(*connected: ReplicaId, **options: Any) -> Harness:
        made.append(Harness(short_path, **options))
        made[-1].bind(*connected)
        made[-1].peers(*connected)
        return made[-1]

    yield one
    for harness in made:
        harness.got.clear()  # what is read from the arena
        harness.close()


def chunk(*replicas: ReplicaId, data: bytes = b"small", seq: int = 0, request: str = "r") -> list[Outgoing]:
    buffers = BufferList()
    body = Chunk(tensors={"x": buffers.add(HostTensor(DType.U8, (len(data),), data))})
    header = Header("", request, *msgspec.structs.astuple(ME), seq=seq, deadline=time.time() + 60)
    return [Outgoing(replica_id, header, body, buffers.buffers) for replica_id in replicas]


def mapped(harness: Harness, *replicas: ReplicaId) -> None:
    for replica_id in replicas:
        harness.outbound.granted(replica_id, Credit(mapped=True))


def test_fan_out_publishes_once_for_those_that_have_mapped_the_arena(start: Start) -> None:
    harness = start(TALKER, OTHER)
    harness.outbound.send(chunk(TALKER, data=LARGE))
    first = harness.receive(TALKER, 1)[0]
    assert not first.header.blocks, "the receiver has not said yet that it reads the arena"
    mapped(harness, TALKER, OTHER)
    harness.outbound.send(chunk(TALKER, OTHER, data=LARGE, seq=1))
    second = harness.receive(TALKER, 2)[1]
    assert bytes(second.buffers[0]) == LARGE
    assert harness.outbound.counts()["arena_blocks"] == 1
    ticket = second.header.blocks[0].ticket
    del second, first
    harness.got[TALKER].clear()
    assert harness.receive(OTHER, 1)[0].header.blocks[0].ticket == ticket
    harness.outbound.granted(TALKER, Credit(released=(ticket,)))
    harness.outbound.granted(ReplicaId("stranger", 0, 5), Credit(released=(ticket,)))
    until(lambda: harness.outbound.counts().get("dropped_credit_of_unknown_peer") == 1)
    assert harness.outbound.counts()["arena_blocks"] == 1
    harness.outbound.granted(OTHER, Credit(released=(ticket,)))
    until(lambda: harness.outbound.counts()["arena_blocks"] == 0)
    assert set(harness.measured(table.EDGE_CREDIT)) == {"coordinator", "talker/0", OTHER.name}
    messages = harness.measured(table.EDGE_MESSAGES)
    assert (messages["talker/0"], messages[OTHER.name]) == (2, 1)
    shared = harness.measured(table.EDGE_SHARED)
    assert shared["talker/0"] == len(LARGE), "the first one went through the socket"
    assert shared[OTHER.name] == len(LARGE)
    sent = harness.measured(table.EDGE_BYTES)
    assert len(LARGE) < sent["talker/0"] < len(LARGE) + 1000
    assert 0 < sent[OTHER.name] < 500
    assert harness.measured(table.EDGE_OUT)[OTHER.name] == 1
    assert harness.measured(table.EDGE_CREDIT)[OTHER.name] == FlowConfig().edge_messages - 1


def test_no_credit_no_message_and_the_stage_is_held_up(start: Start) -> None:
    harness = start(TALKER, flow=FlowConfig(edge_messages=3, outbox_messages=4))
    for seq in range(7):
        harness.outbound.send(chunk(TALKER, seq=seq))
    harness.receive(TALKER, 3)
    until(lambda: harness.outbound.waiting == 4)
    assert not harness.outbound.congested
    harness.outbound.send(chunk(TALKER, seq=7))
    assert harness.outbound.congested, "at once, whatever the thread does"
    harness.outbound.send([Outgoing(None, Header("", "r"), TextDelta(text="x"))])
    decoder: Decoder[FromStage] = Decoder(FromStage)
    until(lambda: any(decoder.decode(frames) for frames in drain(harness.results))), "other edges are not held up"
    assert len(harness.receive(TALKER, 3)) == 3
    harness.outbound.granted(TALKER, Credit(messages=3, bytes=10_000))
    harness.receive(TALKER, 6)
    until(lambda: harness.outbound.waiting == 2)
    assert not harness.outbound.congested
    harness.outbound.granted(TALKER, Credit(messages=3, bytes=10_000))
    assert [envelope.header.seq for envelope in harness.receive(TALKER, 8)] == list(range(8))
    until(lambda: harness.outbound.waiting == 0)


def text(seq: int) -> Outgoing:
    return Outgoing(None, Header("", "r", *msgspec.structs.astuple(ME), seq=seq), TextDelta(text="x"))


def test_credit_does_not_queue_behind_what_waits_for_credit(start: Start) -> None:
    harness = start(flow=FlowConfig(edge_messages=1))
    decoder: Decoder[FromStage] = Decoder(FromStage)
    got: list[str] = []

    def came(count: int) -> bool:
        got.extend(decoder.decode(frames).header.kind for frames in drain(harness.results))
        return len(got) >= count

    harness.outbound.send([text(0)])
    until(lambda: came(1))
    harness.outbound.send([text(1), text(2)])
    harness.outbound.grant(None, 3, 300)
    until(lambda: came(2))
    assert got == ["text", "credit"]
    assert harness.outbound.waiting == 2


@pytest.mark.parametrize("sizes", [(5, 5, 5), (300_000, 5, 5), (5, 300_000, 5), (300_000, 300_000, 5)])
def test_what_goes_at_once_never_overtakes_what_is_left_to_the_thread(start: Start, sizes: tuple[int, ...]) -> None:
    harness = start(TALKER)
    mapped(harness, TALKER)
    for seq in range(60):
        harness.outbound.send(chunk(TALKER, data=bytes(sizes[seq % 3]), seq=seq), idle=seq % 5 == 0)
        if seq % 20 == 7:
            harness.outbound.send([m for n in range(12) for m in chunk(TALKER, seq=n, request=f"batch {seq}")])
    envelopes = harness.receive(TALKER, 60 + 3 * 12)
    assert [e.header.seq for e in envelopes if e.header.request_id == "r"] == list(range(60))
    for seq in (7, 27, 47):
        assert [e.header.seq for e in envelopes if e.header.request_id == f"batch {seq}"] == list(range(12))


def test_oversize_is_refused_before_anything_is_sent(start: Start) -> None:
    """In a frame or in a block: the request ends with the limit in the text, and what follows is sent."""
    harness = start(TALKER, limits=Limits(buffer_bytes=50_000))
    for reads_arena in (False, True):
        if reads_arena:
            mapped(harness, TALKER)
        harness.outbound.send(chunk(TALKER, data=LARGE, request="large"))
        rejected = harness.events.get(timeout=5 * PATIENCE)
        assert isinstance(rejected, Rejected)
        assert rejected.header.request_id == "large"
        assert "the limit is 50000" in rejected.error.message
        assert harness.outbound.counts()["arena_blocks"] == 0
    harness.outbound.send(chunk(TALKER))
    assert [envelope.header.request_id for envelope in harness.receive(TALKER, 1)] == ["r"]


def test_restarted_peer_is_another_one(start: Start) -> None:
    """Nothing that was meant for the former life goes to the new one, and its blocks are freed."""
    harness = start(TALKER)
    mapped(harness, TALKER)
    harness.outbound.send(chunk(TALKER, data=LARGE))
    harness.receive(TALKER, 1)
    assert harness.outbound.counts()["arena_blocks"] == 1
    again = ReplicaId("talker", 0, 6)
    harness.bind(again)
    harness.peers(again)
    until(lambda: harness.outbound.counts()["arena_blocks"] == 0)
    harness.outbound.send(chunk(TALKER, seq=1, request="old"))
    harness.outbound.send(chunk(again, data=LARGE, request="new"))
    assert [envelope.header.request_id for envelope in harness.receive(again, 1)] == ["new"]
    assert not harness.got[again][0].header.blocks, "the new life has not mapped anything yet"
    lost = harness.events.get(timeout=5 * PATIENCE)
    assert isinstance(lost, Undelivered)
    assert isinstance(lost.error, StageLost)
    assert lost.request_id == "old"
    assert lost.receiver == TALKER
    until(lambda: harness.measured(table.EDGE_MESSAGES)["talker/0"] == 2)  # to both lives
    assert harness.measured(table.EDGE_SHARED)["talker/0"] == len(LARGE)
    harness.peers()
    until(lambda: "talker/0" not in harness.measured(table.EDGE_CREDIT))
    assert harness.measured(table.EDGE_MESSAGES)["talker/0"] == 2


def test_peer_that_never_comes_ends_its_requests(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = start()
    monkeypatch.setattr("omni_actors.transport.link.Link.stalled", lambda link: link.backlog > 0)
    harness.peers(TALKER)
    harness.outbound.send(chunk(TALKER))
    lost = harness.events.get(timeout=5 * PATIENCE)
    assert isinstance(lost, Undelivered)
    assert lost.request_id == "r"
    assert lost.receiver == TALKER
    until(lambda: harness.outbound.waiting == 0)


def test_what_comes_before_the_address_of_a_new_life_waits_for_it(start: Start) -> None:
    harness, again = start(TALKER), ReplicaId("talker", 0, 6)
    harness.bind(again)
    harness.outbound.send(chunk(TALKER, seq=0))
    harness.receive(TALKER, 1)
    harness.outbound.send(chunk(again, seq=0))
    harness.outbound.send(chunk(again, seq=1))
    with pytest.raises(queue.Empty):
        harness.events.get(timeout=0.3)
    harness.peers(again)
    assert [envelope.header.seq for envelope in harness.receive(again, 2)] == [0, 1]
    harness.outbound.send(chunk(TALKER, seq=1))
    rejected = harness.events.get(timeout=5 * PATIENCE)
    assert isinstance(rejected.error, StageLost), "its former life is gone for good"
