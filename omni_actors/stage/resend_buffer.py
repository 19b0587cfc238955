"""What a stage has sent to the stages after it, kept until its request ends: one of them may have to start again.

It keeps references to the buffers that were sent. Small ones are copied: they are slices of what a step made for its
whole batch, and would keep all of that alive. Tokens that came one by one are kept, and sent again, as one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from omni_actors.protocol.codec import Frame
from omni_actors.protocol.fields import ReplicaId
from omni_actors.protocol.messages import Chunk
from omni_actors.sharing import Budget

COPIED_BYTES = 1 << 20  # buffers up to this size
JOINED_BYTES = 64 << 10  # of token ids in one message
ENTRY_BYTES = 512  # what a kept message counts in addition to its tokens and buffers


@dataclass
class Receiver:
    """What one of the stages after this one has got. `attempt` is the receiver's."""

    replica_id: ReplicaId
    attempt: int
    sent: int = 0  # messages: the number of the next one
    resend_from: int | None = None  # the next entry to be sent again; `None`: it has all
    unreachable: bool = False  # it takes nothing, and the coordinator knows


class _Kept:
    """One message, or several that held nothing but consecutive tokens."""

    def __init__(self, chunk: Chunk, buffers: Sequence[Frame]) -> None:
        self._chunk = chunk
        self._tokens = bytearray(chunk.token_ids)
        self._final = chunk.final
        self.buffers = [_detached(buffer) for buffer in buffers]
        self.size = ENTRY_BYTES + len(self._tokens) + sum(memoryview(buffer).nbytes for buffer in buffers)  # at first

    def join(self, chunk: Chunk) -> bool:
        """Append the tokens that follow those here; false if there is more than tokens in either."""
        follows = self._chunk.start + len(self._tokens) // 4 == chunk.start
        if self._final or not (follows and _only_tokens(self._chunk) and _only_tokens(chunk)):
            return False
        if len(self._tokens) + len(chunk.token_ids) > JOINED_BYTES:
            return False
        self._tokens += chunk.token_ids
        self._final = chunk.final
        return True

    @property
    def chunk(self) -> Chunk:
        return msgspec.structs.replace(self._chunk, token_ids=bytes(self._tokens), final=self._final)


class ResendBuffer:
    """Everything that one attempt at a request gave to the stages after this one. All of a stage share the budget."""

    def __init__(self, budget: Budget, receivers: Iterable[ReplicaId], attempt: int) -> None:
        self.receivers = {replica_id.stage: Receiver(replica_id, attempt) for replica_id in receivers}
        self._budget = budget
        self._entries: list[_Kept] = []
        self.intact = True  # nothing of it was released

    def keep(self, chunk: Chunk, buffers: Sequence[Frame]) -> bool:
        """Keep a message of an attempt that is intact. False if that exceeds the budget: then all of it is released."""
        if self._entries and not buffers and self._entries[-1].join(chunk):
            self._budget.take(self, len(chunk.token_ids))
        else:
            self._entries.append(_Kept(chunk, buffers))
            self._budget.take(self, self._entries[-1].size)
        if not self._budget.fits():
            self.release()
        return self.intact

    def release(self) -> None:
        """Free what is kept. Idempotent."""
        self._budget.release(self)
        self.intact = False
        self._entries.clear()

    def restart(self, replica_id: ReplicaId, attempt: int) -> Receiver:
        """Put `replica_id`, which has got nothing yet, in the place of its stage's former receiver."""
        self.receivers[replica_id.stage].resend_from = None
        receiver = Receiver(replica_id, attempt, resend_from=0 if self._entries else None)
        self.receivers[replica_id.stage] = receiver
        return receiver

    def next_resend(self, receiver: Receiver) -> tuple[Chunk, Sequence[Frame]] | None:
        """Return the next message to send again to a receiver; `None` if it has all."""
        if receiver.resend_from is None or receiver.resend_from >= len(self._entries):
            receiver.resend_from = None
            return None
        entry = self._entries[receiver.resend_from]
        receiver.resend_from += 1
        if receiver.resend_from == len(self._entries):  # what is made from now on goes to it directly
            receiver.resend_from = None
        return entry.chunk, entry.buffers


def _only_tokens(chunk: Chunk) -> bool:
    return chunk.rows is None and not chunk.tensors and chunk.information is None


def _detached(buffer: Frame) -> Frame:
    return bytes(buffer) if isinstance(buffer, memoryview) and buffer.nbytes <= COPIED_BYTES else buffer
