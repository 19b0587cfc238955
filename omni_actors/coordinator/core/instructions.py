"""What the coordinator's decisions tell its shell to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omni_actors.protocol.codec import Frame
from omni_actors.protocol.header import Body, ReplicaId


@dataclass(frozen=True, slots=True)
class ToClient:
    """Send `body` to a client."""

    client: bytes
    request_id: str
    seq: int
    body: Body
    buffers: Sequence[Frame] = ()


@dataclass(frozen=True, slots=True)
class ToStage:
    """Send `body` to the inbox of a replica. `attempt` is the one that this stage works on."""

    replica_id: ReplicaId
    request_id: str
    attempt: int
    deadline: float
    body: Body
    buffers: Sequence[Frame] = ()


Instruction = ToClient | ToStage
