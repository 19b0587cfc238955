"""Large buffers of a stage's messages: copied into its arena once, for all receivers of a batch that have mapped it."""

from __future__ import annotations

from collections.abc import Sequence

from omni_actors.host.clocks import STEADY
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.common import Credit
from omni_actors.protocol.header import MAX_BLOCKS, Block, ReplicaId
from omni_actors.stage.outgoing import Outgoing
from omni_actors.transport.arena import GRACE_SECONDS, Arena

NO_DEADLINE_SECONDS = 600.0  # for which a block of a request without deadline is kept

Unfilled = Sequence[tuple[Block, Frame]]  # blocks, and what is to be copied into them


class Publications:
    """Not thread-safe, except for `fill` and `counts`.

    Args:
        arena: this process's own; `None` sends all buffers as frames.
        identity: holds a block until its message is sent.
        inline_bytes: buffers up to this size travel as frames.
    """

    def __init__(self, arena: Arena | None, identity: ReplicaId, inline_bytes: int) -> None:
        self._arena = arena
        self._identity = identity
        self._inline_bytes = inline_bytes
        self.readers: set[ReplicaId] = set()  # those that have mapped the arena

    def place(self, message: Outgoing, placed: dict[int, Block]) -> tuple[tuple[Block, ...], Unfilled]:
        """Reserve blocks for a message's large buffers; return them, and those of them that are to be filled.

        Where there is no room buffers travel as frames.

        Args:
            placed: blocks of the same batch, by identity of the buffer; new ones are added.
        """
        arena = self._arena
        if arena is None or message.destination not in self.readers:
            return (), ()
        blocks: list[Block] = []
        unfilled: list[tuple[Block, Frame]] = []
        for index, buffer in enumerate(message.buffers):
            size = length(buffer)
            if size <= self._inline_bytes or len(blocks) == MAX_BLOCKS:
                continue
            block = placed.get(id(buffer))
            if block is None:
                expires = (message.header.deadline or STEADY() + NO_DEADLINE_SECONDS) + GRACE_SECONDS
                block = arena.reserve(size, self._identity, expires)
                if block is None:
                    continue
                unfilled.append((block, buffer))
                placed[id(buffer)] = block
            blocks.append(Block(index, block.offset, block.length, block.ticket))
        return tuple(blocks), unfilled

    def fill(self, unfilled: Unfilled) -> None:
        """Copy the buffers, which may take milliseconds. No lock is needed: only the outbound thread expires blocks."""
        if self._arena is not None:
            for block, buffer in unfilled:
                self._arena.write(block, buffer)

    def share(self, blocks: Sequence[Block], receiver: ReplicaId) -> int:
        """Note that a receiver holds these blocks; return their bytes."""
        if self._arena is not None:
            for block in blocks:
                self._arena.share(block, receiver)
        return sum(block.length for block in blocks)

    def release_batch(self, placed: dict[int, Block]) -> None:
        """Leave a batch's blocks to their receivers. Those without any become free."""
        if self._arena is not None:
            for block in placed.values():
                self._arena.release(self._identity, block.ticket)

    def credited(self, receiver: ReplicaId, credit: Credit) -> None:
        """Note what a receiver says of the arena: that it has mapped it, and which blocks it needs no more."""
        if self._arena is None:
            return
        if credit.mapped:
            self.readers.add(receiver)
        for ticket in credit.released:
            self._arena.release(receiver, ticket)

    def forget(self, receiver: ReplicaId) -> None:
        """Release everything that a dead receiver held."""
        self.readers.discard(receiver)
        if self._arena is not None:
            self._arena.forget(receiver)

    def expire(self) -> None:
        """Free blocks whose receivers have not given them back in time."""
        if self._arena is not None:
            self._arena.expire(STEADY())

    def counts(self) -> dict[str, int]:
        """Blocks in use, and totals of those published and of buffers that did not fit; empty without an arena."""
        if self._arena is None:
            return {}
        totals = {"total_blocks": self._arena.publications, "dropped_arena_full": self._arena.fallbacks}
        return self._arena.counts() | totals


def length(buffer: Frame) -> int:
    """Bytes of a buffer."""
    return len(buffer) if isinstance(buffer, bytes) else memoryview(buffer).nbytes
