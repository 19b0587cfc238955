"""Large buffers between the processes of a host: written once into shared memory, read in place, returned by message.

Every stage process owns one `Arena`: anonymous memory (a memfd), allocated at its start, which the stages after it map
read-only through `/proc/PID/fd/N`. It has no name in /dev/shm, so nothing can be left there or needs to be swept: the
kernel frees the memory when the last process that maps it has ended, even after `kill -9` (docs/decisions.md).

A block lives from `reserve` until every consumer has returned its ticket or has died, or until `GRACE_SECONDS` after
the request's deadline. The consumer holds a block for exactly as long as anything refers to its memory: a `memoryview`
of it, or a tensor over that. So no code has to remember to free it, however a request ends.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import psutil
from msgspec import Struct

from omni_actors.errors import InvalidPayload, StartupError
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.fields import Block, Header, ReplicaId
from omni_actors.protocol.messages import ArenaAddress

ALIGNMENT = 64
PREFIX = 64  # bytes before each block's data: its ticket; at the start of the arena: the token
GRACE_SECONDS = 10.0
RELEASE_BYTES = 1 << 20  # a block of this size is returned at once, smaller ones in batches
RELEASE_BLOCKS = 64
Memory = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]
F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 2, 4


class _Published(Struct):
    offset: int
    length: int  # with prefix and padding
    expires: float
    holders: set[ReplicaId]


class Arena:
    """The owner's side. Not thread-safe: callers on several threads need a lock around it.

    Raises:
        StartupError: the host has not enough memory.
    """

    def __init__(self, size: int) -> None:
        available = psutil.virtual_memory().available
        if size > available // 2:
            raise StartupError(
                f"The arena needs {size >> 20} MiB of shared memory; {available >> 20} MiB are available, and it "
                "may take at most half of that.",
                hint="Lower flow.arena_bytes.",
            )
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
        self.fallbacks = 0  # buffers that did not fit

    def reserve(self, size: int, holder: ReplicaId, expires: float) -> Block | None:
        """Allocate a block of `size` bytes for `holder`, to be filled by `write`; `None` if there is no room now.

        The block's `buffer` is 0.
        """
        length = -(-(PREFIX + size) // ALIGNMENT) * ALIGNMENT
        offset = self._allocate(length)
        if offset is None:
            self.fallbacks += 1
            return None
        ticket = self._next_ticket
        self._next_ticket += 1
        self._published[ticket] = _Published(offset, length, expires, {holder})
        self._used += length
        return Block(0, offset + PREFIX, size, ticket)

    def write(self, block: Block, data: Frame) -> None:
        """Fill a reserved block. Other threads may use the arena meanwhile, except for `expire`."""
        numpy.copyto(self._memory[block.offset : block.offset + block.length], numpy.frombuffer(data, numpy.uint8))
        self._map[block.offset - PREFIX : block.offset - PREFIX + 8] = block.ticket.to_bytes(8, "little")

    def share(self, block: Block, consumer: ReplicaId) -> None:
        """Add a consumer to a block that is still held."""
        self._published[block.ticket].holders.add(consumer)

    def release(self, consumer: ReplicaId, ticket: int) -> None:
        """Note that a consumer no longer needs a block. Idempotent; a ticket it does not hold is ignored."""
        published = self._published.get(ticket)
        if published is not None and consumer in published.holders:
            published.holders.discard(consumer)
            if not published.holders:
                self._reclaim(ticket)

    def forget(self, consumer: ReplicaId) -> None:
        """Release all blocks of a consumer that is dead."""
        for ticket in list(self._published):
            self.release(consumer, ticket)

    def expire(self, now: float) -> None:
        """Reclaim blocks that were never returned and whose request ended long ago."""
        for ticket in [ticket for ticket, published in self._published.items() if published.expires <= now]:
            self._reclaim(ticket)

    def counts(self) -> dict[str, int]:
        """Blocks and bytes held now; both zero when the stages after this one are idle. Callable from any thread.

        Also the totals of blocks published and of buffers that did not fit.
        """
        held = {"arena_blocks": len(self._published), "arena_bytes": self._used}
        return {**held, "total_blocks": self._next_ticket - 1, "dropped_arena_full": self.fallbacks}

    def close(self) -> None:
        """Close the descriptor; consumers keep what they have mapped."""
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
        offset, length = published.offset, published.length
        self._used -= length
        self._map[offset : offset + 8] = bytes(8)  # a late reader notices
        index = bisect.bisect(self._free, (offset, length))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free[index - 1]
            self._free[index - 1] = (offset, before + length)
        else:
            self._free.insert(index, (offset, length))


class ArenaReader:
    """The consumer's side: maps the arenas of the stages before. `attach` and `open` belong to one thread at a time.

    Args:
        on_due: called, from any thread, when released blocks should be returned soon.
    """

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._on_due = on_due
        self._maps: dict[ReplicaId, mmap.mmap] = {}
        self._released: collections.deque[tuple[ReplicaId, int]] = collections.deque()  # its methods are atomic
        self._leases: set[tuple[ReplicaId, int]] = set()  # blocks in use, by owner and ticket

    def attach(self, sources: Mapping[ReplicaId, ArenaAddress | None]) -> None:
        """Map the arenas of exactly these processes. One on another host cannot be mapped; it will send frames."""
        for gone in self._maps.keys() - sources.keys():
            del self._maps[gone]  # the memory stays while something in it is in use
        for owner, address in sources.items():
            if address is not None and owner not in self._maps:
                with contextlib.suppress(OSError, ValueError):
                    self._maps[owner] = _map(address)

    def is_mapped(self, owner: ReplicaId) -> bool:
        """Whether blocks of this process can be opened here."""
        return owner in self._maps

    def open(self, header: Header, block: Block) -> memoryview:
        """Return the bytes of a block, in place.

        Raises:
            InvalidPayload: the sender's arena is not mapped, or the block is not (or no longer) what was published.
        """
        owner = header.sender
        mapped = self._maps.get(owner) if owner is not None else None
        if owner is None or mapped is None:
            raise InvalidPayload(f"Buffer {block.buffer} lies in an arena that is not mapped here.")
        begin, end = block.offset, block.offset + block.length
        if begin < 2 * PREFIX or begin % ALIGNMENT or end > len(mapped):
            raise InvalidPayload(f"Block {begin}..{end} is outside of the arena's {len(mapped)} bytes.")
        if int.from_bytes(mapped[begin - PREFIX : begin - PREFIX + 8], "little") != block.ticket:
            raise InvalidPayload(f"Block {block.ticket} of {owner.name} has been freed.")
        key = (owner, block.ticket)
        if key in self._leases:
            raise InvalidPayload(f"Block {block.ticket} of {owner.name} came twice.")
        memory = numpy.frombuffer(mapped, numpy.uint8, block.length, begin)
        self._leases.add(key)
        weakref.finalize(memory, self._release, key, block.length).atexit = False
        return memory.data

    def _release(self, key: tuple[ReplicaId, int], length: int) -> None:
        """Queue a block to which nothing refers any more. Runs on whichever thread dropped it last."""
        self._leases.remove(key)
        self._released.append(key)
        if length >= RELEASE_BYTES or len(self._released) >= RELEASE_BLOCKS:
            self._on_due()

    def take_released(self) -> dict[ReplicaId, list[int]]:
        """Remove and return the tickets to give back, by owner. Call it from one thread at a time."""
        released: dict[ReplicaId, list[int]] = {}
        while self._released:
            owner, ticket = self._released.popleft()
            released.setdefault(owner, []).append(ticket)
        return released

    def counts(self) -> dict[str, int]:
        """Blocks of other processes that are in use here; zero when idle."""
        return {"leases": len(self._leases)}


def _map(address: ArenaAddress) -> mmap.mmap:
    """Raises `OSError` or `ValueError` if the process is on another host, or is not the one meant."""
    descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.fstat(descriptor).st_size != address.size:
            raise ValueError("another file")
        mapped = mmap.mmap(descriptor, address.size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
    finally:
        os.close(descriptor)
    if mapped[:16] != address.token:
        raise ValueError("another file")
    return mapped
