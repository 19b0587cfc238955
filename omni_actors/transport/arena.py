"""Large buffers between processes of a host: written once into shared memory, read in place, given back by message.

Every stage process owns one `Arena`: anonymous memory (a memfd), preallocated at its start, that the stages after it
map read-only through `/proc/PID/fd/N`. No name exists in /dev/shm, so nothing can be left there or has to be swept:
the kernel takes the memory back when the last process that maps it is gone, `kill -9` included (ADR 0010).

A block lives from `publish` until every consumer has given its ticket back, has died, or the request's deadline has
passed by `GRACE_SECONDS`. On the consumer's side a block is held exactly as long as anything refers to its memory: a
`memoryview` of it, or a tensor over that. Nobody has to remember to free it, whichever way a request ends.

A consumer that sends on what it was sent forwards the block instead of copying it (ADR 0012). It holds it until
those after it have given it back; when it dies before, they answer for themselves to the owner.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import psutil

from omni_actors.errors import InvalidPayload, StageLost, StartupError
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.control import ArenaAddress
from omni_actors.protocol.header import Block, Header, Origin, ReplicaId

ALIGNMENT = 64
PREFIX = 64  # bytes before each block's data: its ticket; at the start of the arena: the token
GRACE_SECONDS = 10.0
RELEASE_BYTES = 1 << 20  # a block of this size is given back at once, smaller ones in batches
RELEASE_BLOCKS = 64
Memory = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]
F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 2, 4


def check_budget(size: int, what: str) -> None:
    """Raise `StartupError` unless `size` bytes of shared memory fit into what this host has available."""
    available = psutil.virtual_memory().available
    if size > available // 2:
        raise StartupError(
            f"{what} need {size >> 20} MiB of shared memory; {available >> 20} MiB are available, of which at most "
            "half may be used.",
            hint="Lower flow.arena_bytes.",
        )


class Holder(NamedTuple):
    """Who needs a block: a process, and for one that got it `through` another, which is gone since, that one too."""

    replica_id: ReplicaId
    through: ReplicaId | None = None


@dataclass
class _Published:
    offset: int
    length: int  # with prefix and padding; 0 if the memory is another's
    expires: float
    holders: set[Holder]
    view: Frame | None = None  # of a block of another arena, which is held by it


class Arena:
    """The owner's side. Not thread-safe; what belongs to several threads is used under their lock.

    Raises:
        StartupError: the memory is not there.
    """

    def __init__(self, size: int) -> None:
        check_budget(size, "The arena would")
        self._descriptor = os.memfd_create("omni-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._descriptor, 0, size)  # now, rather than a SIGBUS when memory runs out
            fcntl.fcntl(self._descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
            self._map = mmap.mmap(self._descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            os.close(self._descriptor)
            raise StartupError(
                f"Cannot get {size >> 20} MiB of shared memory: {error.strerror}.", hint="Lower flow.arena_bytes."
            ) from error
        self._memory = numpy.frombuffer(self._map, numpy.uint8)
        token = os.urandom(16)
        self._map[:16] = token
        self.address = ArenaAddress(os.getpid(), self._descriptor, size, token)
        self._free: list[tuple[int, int]] = [(PREFIX, size - PREFIX)]  # (offset, length), by offset, never adjacent
        self._published: dict[int, _Published] = {}
        self._next_ticket = 1
        self._used = 0
        # What readers said of a consumer's death of which we have not heard yet.
        self._said: dict[ReplicaId, dict[ReplicaId, frozenset[int]]] = {}
        self.fallbacks = 0  # buffers that did not fit
        self.forwarded = 0

    def publish(self, data: Frame, consumer: ReplicaId, expires: float) -> Block | None:
        """Copy `data` into a block for `consumer`; `None` if there is no room now. The block's `buffer` is 0."""
        block = self.reserve(memoryview(data).nbytes, consumer, expires)
        if block is not None:
            self.write(block, data)
        return block

    def reserve(self, size: int, holder: ReplicaId, expires: float) -> Block | None:
        """A block of `size` bytes that has no data yet and belongs to `holder`; `None` if there is no room now."""
        length = -(-(PREFIX + size) // ALIGNMENT) * ALIGNMENT
        offset = self._allocate(length)
        if offset is None:
            self.fallbacks += 1
            return None
        ticket = self._next_ticket
        self._next_ticket += 1
        self._published[ticket] = _Published(offset, length, expires, {Holder(holder)})
        self._used += length
        return Block(0, offset + PREFIX, size, ticket)

    def write(self, block: Block, data: Frame) -> None:
        """Fill a reserved block. May run while another thread uses the arena, as long as none calls `expire`."""
        numpy.copyto(self._memory[block.offset : block.offset + block.length], numpy.frombuffer(data, numpy.uint8))
        self._map[block.offset - PREFIX : block.offset - PREFIX + 8] = block.ticket.to_bytes(8, "little")

    def forward(self, found: Found, view: Frame, holder: ReplicaId, expires: float) -> Block:
        """Pass on a block of another arena, `view` and `found` as its reader knows it. It is held there until here
        everybody has released it."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self.forwarded += 1
        self._published[ticket] = _Published(0, 0, expires, {Holder(holder)}, view)
        return Block(0, found.offset, found.length, ticket, found.origin)

    def share(self, block: Block, consumer: ReplicaId) -> None:
        """One more consumer for a block that somebody still holds."""
        self._published[block.ticket].holders.add(Holder(consumer))

    def release(self, consumer: ReplicaId, ticket: int, through: ReplicaId | None = None) -> None:
        """A consumer needs a block no more. Idempotent; tickets of others are ignored."""
        published = self._published.get(ticket)
        holder = Holder(consumer, through)
        if published is not None and holder in published.holders:
            published.holders.discard(holder)
            if not published.holders:
                self._reclaim(ticket)

    def forget(self, consumer: ReplicaId, readers: Collection[ReplicaId] = ()) -> None:
        """A consumer is dead.

        It may have forwarded blocks to `readers`, and may have died before anybody could know. So each of them is taken
        to hold what the dead one held, until it says what it does hold (`hold_only`).
        """
        said = self._said.pop(consumer, {})
        for ticket, published in list(self._published.items()):
            ended = {holder for holder in published.holders if holder.replica_id == consumer}
            if ended:
                heirs = {reader for reader in readers if ticket in said.get(reader, (ticket,))}
                published.holders -= ended
                published.holders |= {Holder(reader, consumer) for reader in heirs}
                if not published.holders:
                    self._reclaim(ticket)

    def hold_only(self, reader: ReplicaId, through: ReplicaId, tickets: Collection[int], known: bool) -> None:
        """Of all blocks that came through a dead consumer a reader needs these. `known`: `forget` was told of that."""
        if not known:
            self._said.setdefault(through, {})[reader] = frozenset(tickets)
            return
        for ticket in self._published.keys() - set(tickets):
            self.release(reader, ticket, through)

    def expire(self, now: float) -> None:
        """Take back what nobody gave back: its request has been over for long."""
        for ticket in [ticket for ticket, published in self._published.items() if published.expires <= now]:
            self._reclaim(ticket)

    @property
    def publications(self) -> int:
        """Blocks so far."""
        return self._next_ticket - 1

    def counts(self) -> dict[str, int]:
        """What is held now, both zero when the stages after this one are idle. From any thread."""
        return {"arena_blocks": len(self._published), "arena_bytes": self._used}

    def close(self) -> None:
        """The descriptor goes; consumers keep what they have mapped."""
        os.close(self._descriptor)

    def _allocate(self, length: int) -> int | None:
        """First fit: what was freed last is reused first, and is still in the cache."""
        for index, (offset, free) in enumerate(self._free):
            if free >= length:
                if free == length:
                    del self._free[index]
                else:
                    self._free[index] = (offset + length, free - length)
                return offset
        return None

    def _reclaim(self, ticket: int) -> None:
        published = self._published.pop(ticket)
        if published.view is not None:  # with it ends what is held of the other arena
            return
        offset, length = published.offset, published.length
        self._used -= length
        self._map[offset : offset + 8] = bytes(8)  # who comes too late sees it
        index = bisect.bisect(self._free, (offset, length))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free[index - 1]
            self._free[index - 1] = (offset, before + length)
        else:
            self._free.insert(index, (offset, length))


class Found(NamedTuple):
    """A block of another arena that was opened here. `offset` and `length` in bytes."""

    origin: Origin
    offset: int
    length: int


class _Lease(weakref.ref[Memory]):
    """Notices the end of the last view of a block's memory. `key` is the sender and its ticket."""

    __slots__ = ("found", "identity", "key", "through")

    key: tuple[ReplicaId, int]
    found: Found
    identity: int  # of the memory
    through: ReplicaId | None  # the sender, once it is gone: the ticket goes back to the owner instead


class ArenaReader:
    """The consumer's side: maps the arenas of the stages before. `attach` and `open` belong to one thread at a time.

    Args:
        on_due: called, from any thread, when released blocks should be given back soon.
    """

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._on_due = on_due
        self._maps: dict[ReplicaId, mmap.mmap] = {}
        self._sources: frozenset[ReplicaId] = frozenset()
        self._released: collections.deque[tuple[Holder, int]] = collections.deque()  # its methods are atomic
        self._leases: dict[tuple[ReplicaId, int], _Lease] = {}
        self._by_memory: dict[int, _Lease] = {}

    def attach(
        self,
        sources: Mapping[ReplicaId, ArenaAddress | None],
        origins: Mapping[ReplicaId, ArenaAddress | None] | None = None,
    ) -> None:
        """Map the arenas of exactly these processes. One on another host cannot be mapped; it will send frames.

        `sources` send their own blocks and may forward those of `origins`.
        """
        wanted = {**(origins or {}), **sources}
        self._sources = frozenset(sources)
        for gone in self._maps.keys() - wanted.keys():
            del self._maps[gone]  # the memory stays while something in it is in use
        for owner, address in wanted.items():
            if address is not None and owner not in self._maps:
                with contextlib.suppress(OSError, ValueError):
                    self._maps[owner] = _map(address, populate=owner in sources)

    def is_mapped(self, owner: ReplicaId) -> bool:
        return owner in self._maps

    @property
    def mapped(self) -> tuple[ReplicaId, ...]:
        return tuple(self._maps)

    def open(self, header: Header, block: Block) -> memoryview:
        """The bytes of a block, in place.

        Raises:
            InvalidPayload: the sender's arena is not mapped, or the block is not (or no longer) what was published.
            StageLost: the sender has forwarded the block, and it or the owner is gone.
        """
        if not header.stage:
            raise InvalidPayload(f"Buffer {block.buffer} lies in an arena that is not mapped here: nobody's.")
        sender = ReplicaId(header.stage, header.replica, header.epoch)
        origin = block.origin or Origin(sender, block.ticket)
        owner = origin.owner
        mapped = self._maps.get(owner)
        if block.origin is not None and (mapped is None or sender not in self._sources):
            raise StageLost(f"A block of {owner.stage}/{owner.replica} came when that or its sender was gone.")
        if mapped is None:
            raise InvalidPayload(f"Buffer {block.buffer} lies in an arena that is not mapped here.")
        begin, end = block.offset, block.offset + block.length
        if begin < 2 * PREFIX or begin % ALIGNMENT or end > len(mapped):
            raise InvalidPayload(f"Block {begin}..{end} is outside of the arena's {len(mapped)} bytes.")
        if int.from_bytes(mapped[begin - PREFIX : begin - PREFIX + 8], "little") != origin.ticket:
            raise InvalidPayload(f"Block {origin.ticket} of {owner.stage}/{owner.replica} has been freed.")
        key = (sender, block.ticket)
        if key in self._leases:
            raise InvalidPayload(f"Block {block.ticket} of {sender.stage}/{sender.replica} came twice.")
        memory = numpy.frombuffer(mapped, numpy.uint8, block.length, begin)
        lease = _Lease(memory, self._release)
        lease.key, lease.identity, lease.through = key, id(memory), None
        lease.found = Found(origin, block.offset, block.length)
        self._leases[key] = self._by_memory[lease.identity] = lease
        return memory.data

    def find(self, buffer: Frame) -> Found | None:
        """The block that a buffer is, all of it and unchanged, if the owner still lives. From any thread."""
        view = memoryview(buffer)
        memory: object = view.obj
        lease = self._by_memory.get(id(memory))
        if lease is None or lease() is not memory or view.nbytes != lease.found.length or not view.c_contiguous:
            return None
        return lease.found if lease.found.origin.owner in self._maps else None

    def lost(self, sender: ReplicaId) -> dict[ReplicaId, list[int]]:
        """A source is gone: what it had forwarded and is still in use, by owner. From now on it goes back to those."""
        held: dict[ReplicaId, list[int]] = {}
        for lease in list(self._leases.values()):
            owner, ticket = lease.found.origin.owner, lease.found.origin.ticket
            if lease.key[0] == sender != owner:
                lease.through = sender
                if lease.key in self._leases:  # else it ended just now, and nobody may have heard of `through`
                    held.setdefault(owner, []).append(ticket)
        return held

    def _release(self, lease: weakref.ref[Memory]) -> None:
        """Nothing refers to a block any more. Runs in whichever thread dropped it last."""
        if not isinstance(lease, _Lease):
            return
        del self._leases[lease.key]
        if self._by_memory.get(lease.identity) is lease:
            del self._by_memory[lease.identity]
        sender, ticket = lease.key
        if lease.through is None:
            self._released.append((Holder(sender), ticket))
        else:
            self._released.append((Holder(lease.found.origin.owner, sender), lease.found.origin.ticket))
        if lease.found.length >= RELEASE_BYTES or len(self._released) >= RELEASE_BLOCKS:
            self._on_due()

    def take_released(self) -> dict[Holder, list[int]]:
        """Tickets to give back, by who gets them and whom they came through. From any one thread."""
        released: dict[Holder, list[int]] = {}
        while self._released:
            receiver, ticket = self._released.popleft()
            released.setdefault(receiver, []).append(ticket)
        return released

    def counts(self) -> dict[str, int]:
        return {"leases": len(self._leases)}


def _map(address: ArenaAddress, populate: bool) -> mmap.mmap:
    """Raises `OSError` or `ValueError` if the process is not of this host, or is another one."""
    descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.fstat(descriptor).st_size != address.size:
            raise ValueError("another file")
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        mapped = mmap.mmap(descriptor, address.size, flags, mmap.PROT_READ)
    finally:
        os.close(descriptor)
    if mapped[:16] != address.token:
        raise ValueError("another file")
    return mapped
