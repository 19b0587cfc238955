"""What a stage has sent, kept until its request ends: a stage after it may have to start again, or the coordinator.

It keeps references to the buffers that were sent. Small ones are copied: they are slices of what a step made for its
whole batch, and would keep all of that alive. Tokens that came one by one are kept, and sent again, as one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeGuard

import msgspec
from msgspec import Struct

from omni_actors.protocol.codec import Frame
from omni_actors.protocol.delivery import Delivery
from omni_actors.protocol.fields import TOKEN_BYTES, Body, ReplicaId
from omni_actors.protocol.messages import Chunk, Output
from omni_actors.sharing import Budget

COPIED_BYTES = 1 << 20  # buffers up to this size
JOINED_BYTES = 64 << 10  # of token ids in one message
ENTRY_BYTES = 512  # what a kept message counts in addition to its tokens and buffers


class Receiver(Struct):
    """What a stage after this one, or the coordinator, has got. `attempt` is the receiver's."""

    replica_id: ReplicaId | None
    attempt: int
    sent: int = 0  # messages: the number of the next one
    resend_from: int | None = None  # the next entry to be sent again; `None`: it has all
    delivery: Delivery | None = None  # of the coordinator: what its client has, which is not sent again
    unreachable: bool = False  # it takes nothing, and the coordinator knows; or it is the coordinator, and gone

    @property
    def behind(self) -> bool:
        """Whether it lacks something that was made before."""
        return self.unreachable or self.resend_from is not None


class _Kept:
    """One message, or several that held nothing but consecutive tokens."""

    def __init__(self, body: Body, buffers: Sequence[Frame]) -> None:
        self._body = body
        self._tokens = bytearray(body.token_ids) if isinstance(body, Chunk) else bytearray()
        self._final = isinstance(body, Chunk) and body.final
        self.buffers = [_detached(buffer) for buffer in buffers]
        self.size = ENTRY_BYTES + len(self._tokens) + sum(memoryview(buffer).nbytes for buffer in buffers)  # at first

    def join(self, chunk: Body) -> bool:
        """Append the tokens that follow those here; false if there is more than tokens in either."""
        if self._final or not (_only_tokens(self._body) and _only_tokens(chunk)):
            return False
        if self._body.start + len(self._tokens) // TOKEN_BYTES != chunk.start:
            return False
        if len(self._tokens) + len(chunk.token_ids) > JOINED_BYTES:
            return False
        self._tokens += chunk.token_ids
        self._final = chunk.final
        return True

    @property
    def body(self) -> Body:
        if not isinstance(self._body, Chunk):
            return self._body
        return msgspec.structs.replace(self._body, token_ids=bytes(self._tokens), final=self._final)


class ResendBuffer:
    """Everything that one attempt gave to the stages after this one, or all results. All of a stage share the budget.

    Args:
        receivers: the replicas of those stages, or `None` for the coordinator.
    """

    def __init__(self, budget: Budget, receivers: Iterable[ReplicaId | None], attempt: int) -> None:
        self.receivers = {stage_of(replica_id): Receiver(replica_id, attempt) for replica_id in receivers}
        self._budget = budget
        self._entries: list[_Kept] = []
        self.intact = True  # nothing of it was released

    def keep(self, body: Body, buffers: Sequence[Frame]) -> bool:
        """Keep a message of an attempt that is intact. False if that exceeds the budget: then all of it is released."""
        if isinstance(body, Chunk) and self._entries and not buffers and self._entries[-1].join(body):
            self._budget.take(self, len(body.token_ids))
        else:
            self._entries.append(_Kept(body, buffers))
            self._budget.take(self, self._entries[-1].size)
        if not self._budget.fits():
            self.release()
        return self.intact

    def release(self) -> None:
        """Free what is kept. Idempotent."""
        self._budget.release(self)
        self.intact = False
        self._entries.clear()

    def restart(self, receiver: Receiver) -> None:
        """Put a receiver, which has got nothing yet, in the place of its stage's former one."""
        stage = stage_of(receiver.replica_id)
        self.receivers[stage].resend_from = None
        receiver.resend_from = 0 if self._entries else None
        self.receivers[stage] = receiver

    def next_resend(self, receiver: Receiver) -> tuple[Body, Sequence[Frame]] | None:
        """Return the next message to send again to a receiver; `None` if it has all.

        Raises:
            StageLost: what the client has is not what was made here.
        """
        found: tuple[Body, Sequence[Frame]] | None = None
        while found is None and receiver.resend_from is not None and receiver.resend_from < len(self._entries):
            entry = self._entries[receiver.resend_from]
            receiver.resend_from += 1
            found = entry.body, entry.buffers
            if receiver.delivery is not None and isinstance(entry.body, Output):
                found = receiver.delivery.take(entry.body, entry.buffers)
        if receiver.resend_from is not None and receiver.resend_from >= len(self._entries):
            # What is made from now on goes to it directly.
            receiver.resend_from = None
        return found


def stage_of(replica_id: ReplicaId | None) -> str:
    """The stage of a receiver, "" for the coordinator."""
    return replica_id.stage if replica_id is not None else ""


def _only_tokens(body: Body) -> TypeGuard[Chunk]:
    return isinstance(body, Chunk) and body.rows is None and not body.tensors and not body.information.entries


def _detached(buffer: Frame) -> Frame:
    return bytes(buffer) if isinstance(buffer, memoryview) and buffer.nbytes <= COPIED_BYTES else buffer
