"""Large buffers between processes of a host: written once into shared memory, read in place, given back by message.

Every stage process owns one `Arena`: anonymous memory (a memfd), preallocated at its start, that the stages after it
map read-only through `/proc/PID/fd/N`. No name exists in /dev/shm, so nothing can be left there or has to be swept:
the kernel takes the memory back when the last process that maps it is gone, `kill -9` included (ADR 0010).

A block lives from `publish` until every consumer has given its ticket back, has died, or the request's deadline has
passed by `GRACE_SECONDS`. On the consumer's side a block is held exactly as long as anything refers to its memory: a
`memoryview` of it, or a tensor over that. Nobody has to remember to free it, whichever way a request ends.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy
import psutil

from omni_actors.codec import Frame
from omni_actors.errors import InvalidPayload, StartupError
from omni_actors.messages import ArenaAddress, Block, Header, Hop

ALIGNMENT = 64
PREFIX = 64  # bytes before each block's data: its ticket; at the start of the arena: the token
GRACE_SECONDS = 10.0
RELEASE_BYTES = 1 << 20  # a block of this size is given back at once, smaller ones in batches
RELEASE_BLOCKS = 64
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


@dataclass
class _Published:
    offset: int
    length: int  # with prefix and padding
    expires: float
    consumers: set[Hop] = field(default_factory=set)


class Arena:
    """The owner's side. Belongs to one thread.

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
        self.fallbacks = 0  # buffers that did not fit

    def publish(self, data: Frame, consumer: Hop, expires: float) -> Block | None:
        """Copy `data` into a block for `consumer`; `None` if there is no room now. The block's `buffer` is 0."""
        source = numpy.frombuffer(data, numpy.uint8)
        length = -(-(PREFIX + source.nbytes) // ALIGNMENT) * ALIGNMENT
        offset = self._allocate(length)
        if offset is None:
            self.fallbacks += 1
            return None
        ticket = self._next_ticket
        self._next_ticket += 1
        begin = offset + PREFIX
        numpy.copyto(self._memory[begin : begin + source.nbytes], source)
        self._map[offset : offset + 8] = ticket.to_bytes(8, "little")
        self._published[ticket] = _Published(offset, length, expires, {consumer})
        self._used += length
        return Block(0, begin, source.nbytes, ticket)

    def share(self, block: Block, consumer: Hop) -> None:
        """One more consumer for a block that has just been published."""
        self._published[block.ticket].consumers.add(consumer)

    def release(self, consumer: Hop, ticket: int) -> None:
        """A consumer needs a block no more. Idempotent; tickets of others are ignored."""
        published = self._published.get(ticket)
        if published is not None and consumer in published.consumers:
            published.consumers.discard(consumer)
            if not published.consumers:
                self._reclaim(ticket)

    def forget(self, consumer: Hop) -> None:
        """A consumer is dead."""
        for ticket in list(self._published):
            self.release(consumer, ticket)

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


class ArenaReader:
    """The consumer's side: maps the arenas of the stages before. `attach` and `open` belong to one thread.

    Args:
        on_due: called, from any thread, when released blocks should be given back soon.
    """

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._on_due = on_due
        self._maps: dict[Hop, mmap.mmap] = {}
        self._released: collections.deque[tuple[Hop, int]] = collections.deque()  # its methods are atomic
        self._leases: set[tuple[Hop, int]] = set()

    def attach(self, sources: dict[Hop, ArenaAddress | None]) -> None:
        """Map the arenas of exactly these processes. One on another host cannot be mapped; it will send frames."""
        for gone in self._maps.keys() - sources.keys():
            del self._maps[gone]  # the memory stays while something in it is in use
        for owner, address in sources.items():
            if address is not None and owner not in self._maps:
                with contextlib.suppress(OSError, ValueError):
                    self._maps[owner] = _map(address)

    def is_mapped(self, owner: Hop) -> bool:
        return owner in self._maps

    def open(self, header: Header, block: Block) -> memoryview:
        """The bytes of a block, in place.

        Raises:
            InvalidPayload: the sender's arena is not mapped, or the block is not (or no longer) what was published.
        """
        owner = Hop(header.stage, header.replica, header.epoch) if header.stage else None
        mapped = self._maps.get(owner) if owner is not None else None
        if owner is None or mapped is None:
            raise InvalidPayload(f"Buffer {block.buffer} lies in an arena that is not mapped here.")
        begin, end = block.offset, block.offset + block.length
        if begin < 2 * PREFIX or begin % ALIGNMENT or end > len(mapped):
            raise InvalidPayload(f"Block {begin}..{end} is outside of the arena's {len(mapped)} bytes.")
        if int.from_bytes(mapped[begin - PREFIX : begin - PREFIX + 8], "little") != block.ticket:
            raise InvalidPayload(f"Block {block.ticket} of {owner.stage}/{owner.replica} has been freed.")
        key = (owner, block.ticket)
        if key in self._leases:
            raise InvalidPayload(f"Block {block.ticket} of {owner.stage}/{owner.replica} came twice.")
        lease = numpy.frombuffer(mapped, numpy.uint8, block.length, begin)
        self._leases.add(key)
        weakref.finalize(lease, self._release, key, block.length).atexit = False
        return lease.data

    def _release(self, key: tuple[Hop, int], length: int) -> None:
        """Nothing refers to a block any more. Runs in whichever thread dropped it last."""
        self._leases.discard(key)
        self._released.append(key)
        if length >= RELEASE_BYTES or len(self._released) >= RELEASE_BLOCKS:
            self._on_due()

    def take_released(self) -> dict[Hop, list[int]]:
        """Tickets to give back, by owner. From any one thread."""
        released: dict[Hop, list[int]] = {}
        while self._released:
            owner, ticket = self._released.popleft()
            released.setdefault(owner, []).append(ticket)
        return released

    def counts(self) -> dict[str, int]:
        return {"leases": len(self._leases)}


def _map(address: ArenaAddress) -> mmap.mmap:
    """Raises `OSError` or `ValueError` if the process is not of this host, or is another one."""
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
