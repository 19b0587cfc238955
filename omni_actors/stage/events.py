"""Events that a stage's socket threads report to its main thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from omni_actors.errors import OmniError
from omni_actors.protocol.codec import Envelope
from omni_actors.protocol.control import CoordinatorToStage
from omni_actors.protocol.header import Header, ReplicaId
from omni_actors.protocol.stage import IntoStage


def sender_of(header: Header) -> ReplicaId | None:
    """Return the replica that sent a message; `None` for the coordinator."""
    return ReplicaId(header.stage, header.replica, header.epoch) if header.stage else None


@dataclass(frozen=True, slots=True)
class Received:
    """A checked message; `size` counts for the credit of its edge."""

    envelope: Envelope[IntoStage]
    size: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """A message about a request that did not decode (`size` as above), or could not be sent (`size` 0)."""

    header: Header
    error: OmniError
    size: int = 0


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A later stage takes no messages; at least one of this request is lost."""

    request_id: str
    receiver: ReplicaId
    error: OmniError


@dataclass(frozen=True, slots=True)
class Control:
    """A message of the coordinator's control connection."""

    body: CoordinatorToStage


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process: signal, launcher gone, or the thread itself failed (`failed`)."""

    reason: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The coordinator is gone or no longer knows this replica: drop all requests and register again."""

    reason: str


Event = Received | Rejected | Undelivered | Control | Stop | Lost


@dataclass
class Pulse:
    """What the heartbeat reports of the engine loop: one thread assigns, another reads, so no lock is needed."""

    progress: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    listeners: int = 0
