"""Blocks in shared memory: what frees them, and that a stale or made-up one is noticed."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator

import msgspec
import pytest

from omni_actors.errors import InvalidPayload, StartupError
from omni_actors.protocol.codec import BadBody, BufferList, Decoder, encode
from omni_actors.protocol.fields import Block, DType, Header, HostTensor, ReplicaId
from omni_actors.protocol.messages import Chunk, IntoStage
from omni_actors.transport.arena import ALIGNMENT, PREFIX, Arena, ArenaReader

OWNER, ME, OTHER = ReplicaId("thinker", 0, 1), ReplicaId("talker", 0, 1), ReplicaId("talker", 1, 1)
HEADER = Header("", "r1", *msgspec.structs.astuple(OWNER))
SIZE = 1 << 20


def publish(arena: Arena, data: bytes, consumer: ReplicaId, expires: float) -> Block | None:
    """Copy `data` into a block for `consumer`; `None` if there is no room."""
    block = arena.reserve(len(data), consumer, expires)
    if block is not None:
        arena.write(block, data)
    return block


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(SIZE)
    yield made
    made.close()


@pytest.fixture
def reader(arena: Arena) -> ArenaReader:
    made = ArenaReader(lambda: None)
    made.attach({OWNER: arena.address})
    return made


def test_bytes_arrive_in_place_and_are_given_back_with_the_last_view(arena: Arena, reader: ArenaReader) -> None:
    data = os.urandom(100_000)
    block = publish(arena, data, ME, 1e12)
    view = reader.open(HEADER, block)
    assert view == data
    assert view.readonly
    assert arena.counts()["arena_blocks"] == 1
    assert reader.counts() == {"leases": 1}
    part = view[50_000:]
    del view
    assert reader.take_released() == {}, "a part of it is still in use"
    del part
    assert reader.take_released() == {OWNER: [block.ticket]}
    assert reader.counts() == {"leases": 0}
    arena.release(ME, block.ticket)
    assert {"arena_blocks": 0, "arena_bytes": 0}.items() <= arena.counts().items()


def test_death_of_the_consumer_and_time_free_blocks(arena: Arena) -> None:
    for _ in range(3):
        publish(arena, bytes(1000), ME, 100.0)
    shared = publish(arena, bytes(1000), ME, 200.0)
    arena.share(shared, OTHER)
    arena.expire(99.0)
    assert arena.counts()["arena_blocks"] == 4
    arena.forget(ME)
    assert arena.counts()["arena_blocks"] == 1
    arena.expire(200.0)
    assert {"arena_blocks": 0, "arena_bytes": 0}.items() <= arena.counts().items()


@pytest.mark.parametrize(
    "block",
    [
        Block(0, 0, 16, 1),
        Block(0, PREFIX, 16, 1),
        Block(0, 3 * ALIGNMENT + 1, 16, 1),
        Block(0, 2 * PREFIX, SIZE, 1),
        Block(0, 2**53, 1, 1),
        Block(0, SIZE, 0, 1),
        Block(0, 2 * PREFIX, 10, 99),
    ],
)
def test_made_up_blocks_are_refused(arena: Arena, reader: ArenaReader, block: Block) -> None:
    publish(arena, bytes(1000), ME, 1e12)
    with pytest.raises(InvalidPayload):
        reader.open(HEADER, block)
    assert reader.counts() == {"leases": 0}


def test_a_block_of_another_sender_or_twice_is_refused(arena: Arena, reader: ArenaReader) -> None:
    block = publish(arena, bytes(1000), ME, 1e12)
    for header in (Header("", "r"), msgspec.structs.replace(HEADER, epoch=2)):
        with pytest.raises(InvalidPayload, match="not mapped"):
            reader.open(header, block)
    first = reader.open(HEADER, block)
    with pytest.raises(InvalidPayload, match="twice"):
        reader.open(HEADER, block)
    assert first == bytes(1000)


def test_random_use_never_overlaps(arena: Arena, reader: ArenaReader) -> None:
    chance = random.Random(7)
    held: dict[int, tuple[Block, bytes]] = {}
    for _ in range(3000):
        if held and chance.random() < 0.5:
            block, data = held.pop(chance.choice(list(held)))
            assert reader.open(HEADER, block) == data
            arena.release(ME, block.ticket)
        else:
            data = bytes([chance.randrange(256)]) * chance.randrange(1, 60_000)
            block = publish(arena, data, ME, 1e12)
            if block is not None:
                held[block.ticket] = (block, data)
    for block, data in held.values():
        assert reader.open(HEADER, block) == data
        arena.release(ME, block.ticket)
    assert publish(arena, bytes(SIZE - 2 * PREFIX), ME, 1e12) is not None, "all of the arena is free, in one piece"


def test_another_process_is_not_mistaken_for_the_owner(arena: Arena) -> None:
    address = arena.address
    wrong = [
        msgspec.structs.replace(address, token=bytes(16)),
        msgspec.structs.replace(address, size=SIZE * 2),
        msgspec.structs.replace(address, descriptor=0),
        msgspec.structs.replace(address, descriptor=100_000),
        msgspec.structs.replace(address, pid=2**31 - 1),
    ]
    for index, made_up in enumerate(wrong):
        reader = ArenaReader(lambda: None)
        reader.attach({OWNER: made_up})
        assert not reader.is_mapped(OWNER), index


def test_memory_outlives_its_owner_while_in_use(arena: Arena, reader: ArenaReader) -> None:
    block = publish(arena, b"z" * 5000, ME, 1e12)
    view = reader.open(HEADER, block)
    reader.attach({})
    assert not reader.is_mapped(OWNER)
    gc.collect()
    assert view == b"z" * 5000


def test_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"flow\.arena_bytes"):
        Arena(1 << 46)

    def full(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StartupError, match="No space left"):
        Arena(SIZE)
    assert len(os.listdir("/proc/self/fd")) == before


def test_messages_with_blocks(arena: Arena, reader: ArenaReader) -> None:
    """Frames and blocks mixed: the receiver sees the same buffers in the same order."""
    payloads = [b"small", os.urandom(50_000), b"tiny!", os.urandom(70_000)]
    buffers = BufferList()
    chunk = Chunk(tensors={str(i): buffers.add(HostTensor(DType.U8, (len(p),), p)) for i, p in enumerate(payloads)})
    blocks = []
    for index in (1, 3):
        block = publish(arena, payloads[index], ME, 1e12)
        blocks.append(msgspec.structs.replace(block, buffer=index))
    frames = encode(HEADER, chunk, buffers.buffers, blocks=tuple(blocks))
    assert len(frames) == 3 + 2
    decoder: Decoder[IntoStage] = Decoder(IntoStage, None, reader.open)
    envelope = decoder.decode(frames)
    assert [bytes(buffer) for buffer in envelope.buffers] == payloads
    with pytest.raises(BadBody, match="no shared memory"):
        Decoder(IntoStage).decode(frames)
    for wrong in ((blocks[0], blocks[0]), (msgspec.structs.replace(blocks[0], buffer=9), blocks[1])):
        with pytest.raises(BadBody):
            decoder.decode([frames[0], *encode(HEADER, chunk, buffers.buffers, blocks=wrong)[1:3], b"small", b"tiny!"])
    del envelope
    assert sum(map(len, reader.take_released().values())) >= 2
