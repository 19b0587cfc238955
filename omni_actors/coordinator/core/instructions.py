"""Instructions: what the pure decisions tell the coordinator's shell to do, and what it is to remember."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from omni_actors.config import PipelineConfig
from omni_actors.config.placement import slot_of
from omni_actors.coordinator.core.replicas import Evidence, Replica
from omni_actors.errors import OmniError
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.fields import Body, Count, Header, ReplicaId, ReplicaIndex, StageName
from omni_actors.protocol.messages import (
    CoordinatorToNode,
    CoordinatorToStage,
    HeldRequest,
    Output,
    Snapshot,
    StageDone,
    Submit,
)


class RememberedReplica(Struct, frozen=True, forbid_unknown_fields=True):
    """A replica or spare of a pipeline, and what was ordered of its process `spawn_epoch`; 0 for no process."""

    stage: StageName
    index: ReplicaIndex
    node: ReplicaIndex
    slot: ReplicaIndex
    spawn_epoch: Count
    spare: bool = False
    joining: bool = False
    drain: bool = False
    restart: bool = False


def as_configured(pipeline: PipelineConfig) -> list[RememberedReplica]:
    """All replicas of a pipeline in which no operator has changed anything."""
    return [
        RememberedReplica(
            stage.name, index, stage.node_of(index), slot_of(stage, index), 0, spare=index >= stage.replicas
        )
        for stage in pipeline.stages
        for index in range(stage.processes)
    ]


# -- about requests ---------------------------------------------------------------------------------------------------


class ToClient(Struct, frozen=True):
    """Send `body` to a client."""

    client: bytes
    request_id: str
    seq: int
    body: Body
    buffers: Sequence[Frame] = ()


class ToStage(Struct, frozen=True):
    """Send `body` to the inbox of a replica. `attempt` is the one that this stage works on."""

    replica_id: ReplicaId
    request_id: str
    attempt: int
    deadline: float
    body: Body
    buffers: Sequence[Frame] = ()


Instruction = ToClient | ToStage

# -- about processes --------------------------------------------------------------------------------------------------


class Announce(Struct, frozen=True):
    """Print a line for the person at the terminal."""

    text: str


class ShowProgress(Struct, frozen=True):
    """Show how far the launch has come, in place of what was shown before.

    Args:
        is_line: whether to print it as a line where nothing can be redrawn.
    """

    text: str
    is_line: bool


DEBUG, WARNING, ERROR = 10, 30, 40  # the levels of `logging`, which the core does not import


class Log(Struct, frozen=True):
    """Write a log line about a stage, "" for none."""

    level: int
    text: str
    stage: str = ""


class TellNode(Struct, frozen=True):
    """Send `body` to the agent of a node. One that cannot be reached says hello again when it is back."""

    rank: int
    body: CoordinatorToNode


class TellReplica(Struct, frozen=True):
    """Send `body` over the control connection of a stage process."""

    replica_id: ReplicaId
    body: CoordinatorToStage


class ReplicaRegistered(Struct, frozen=True):
    """Connect to the inbox of a replica."""

    replica: Replica


class ReplicaReady(Struct, frozen=True):
    """Run the requests that wait for a replica."""

    replica: Replica


class ReplicaHolds(Struct, frozen=True):
    """Note what a replica has of the requests of the coordinator before."""

    replica: Replica
    held: Sequence[HeldRequest]


class ServeClients(Struct, frozen=True):
    """Read what clients ask: all replicas that the coordinator before had are here again, as far as they come."""


class ReplicaLost(Struct, frozen=True):
    """Disconnect from a replica; what it held runs again or fails. `evidence`: what that says against its requests."""

    replica: Replica
    why: str
    evidence: Evidence


class Remember(Struct, frozen=True):
    """Keep these, which are all, for the coordinator after this one, in place of what was kept before."""

    replicas: Sequence[RememberedReplica]


class Measured(Struct, frozen=True):
    """Pass on what a living stage process measured."""

    replica: Replica
    snapshot: Snapshot


class GiveUp(Struct, frozen=True):
    """End the pipeline: the launch has failed."""

    reason: str


FleetInstruction = (
    Announce
    | ShowProgress
    | Log
    | TellNode
    | TellReplica
    | ReplicaRegistered
    | ReplicaReady
    | ReplicaHolds
    | ServeClients
    | ReplicaLost
    | Remember
    | Measured
    | GiveUp
)
Instructions = list[FleetInstruction]


class Observer:
    """Does nothing; subclasses override the events they need. No method may raise."""

    def refused(self, error: OmniError) -> None:
        """A request was not admitted."""

    def admitted(self, header: Header, submit: Submit) -> None:
        """A request was accepted; `ended` will follow."""

    def bound(self, request_id: str, attempt: int, route: tuple[ReplicaId, ...], begun: Sequence[str]) -> None:
        """An attempt was announced to the replicas of the stages `begun`; the rest of the route goes on as it was."""

    def replayed(self, request_id: str, error: OmniError, counts: bool) -> None:
        """The work of a stage is lost; it runs again, with those that depend on it, as soon as they can be bound.

        `counts` is false for a consequence of a loss that was reported before.
        """

    def came(self, header: Header, body: Output) -> None:
        """Output of the present attempt came from a stage."""

    def delivered(self, request_id: str, body: Output) -> None:
        """The new part of a result was sent to the client."""

    def stage_done(self, header: Header, body: StageDone) -> None:
        """A stage has finished its present attempt."""

    def ended(self, request_id: str, error: OmniError | None) -> None:
        """An admitted request has ended, exactly once; `error` is `None` if it is done."""
