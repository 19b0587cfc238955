"""Control channel between a stage process and the coordinator."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from omni_actors.protocol.fields import Count, Moment
from omni_actors.protocol.header import Body, ReplicaId
from omni_actors.protocol.telemetry import Snapshot


class ArenaAddress(Struct, frozen=True, array_like=True):
    """Where a process's shared memory is: a file of the process itself. `token` (in its first bytes) proves it."""

    pid: Annotated[int, Meta(ge=1, le=2**31)]
    descriptor: Annotated[int, Meta(ge=0, le=2**31)]
    size: Annotated[int, Meta(ge=1, le=2**46)]
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]


class Hello(Body, tag="hello", frozen=True):
    """Stage -> coordinator, first message: who I am. A mismatch of the three versions fails the start.

    A process says hello again, with the next epoch, when it has lost its coordinator: `spawn_epoch` is its first epoch.
    """

    protocol: int
    package: str
    config: str
    pid: int
    inbox: Annotated[str, Meta(min_length=1, max_length=256)]
    arena: ArenaAddress | None = None
    spawn_epoch: Count = 0


class Welcome(Body, tag="welcome", frozen=True):
    """Coordinator -> stage: accepted; send results to this endpoint."""

    results: Annotated[str, Meta(min_length=1, max_length=256)]


class Loading(Body, tag="loading", frozen=True):
    """Stage -> coordinator: what the start-up is doing now, for people to read."""

    phase: Annotated[str, Meta(max_length=256)]


class Ready(Body, tag="ready", frozen=True):
    """Stage -> coordinator: the engine takes requests. `facts` are what the model says of itself (voices, rates)."""

    seconds: float
    voices: tuple[str, ...] = ()
    sample_rate: int = 0
    max_input_tokens: int = 0


class Peer(Struct, frozen=True, array_like=True):
    stage: str
    replica: int
    epoch: int
    inbox: str
    arena: ArenaAddress | None = None

    @property
    def replica_id(self) -> ReplicaId:
        return ReplicaId(self.stage, self.replica, self.epoch)


class Peers(Body, tag="peers", frozen=True):
    """Coordinator -> stage: the replicas after it and before it (`sources`) that are up now; a missing one is gone."""

    peers: tuple[Peer, ...]
    sources: tuple[Peer, ...] = ()


class Heartbeat(Body, tag="heartbeat", frozen=True):
    """Stage -> coordinator: alive. `progress` counts turns of the engine loop, `counts` what the stage holds.

    `sent` lets the coordinator compare the clocks.
    """

    progress: Count
    counts: dict[str, int] = {}
    sent: Moment = 0.0


class Shutdown(Body, tag="shutdown", frozen=True):
    """Coordinator -> stage or node: end; what is in flight is aborted. `failed`: the launch failed for `reason`."""

    reason: str = ""
    failed: bool = False


class Reregister(Body, tag="reregister", frozen=True):
    """Coordinator -> stage or node: I do not know you (any more); say hello again."""


class Fatal(Body, tag="fatal", frozen=True):
    """Stage -> coordinator: this process is about to end, and why."""

    message: Annotated[str, Meta(max_length=16384)]


StageToCoordinator = Hello | Loading | Ready | Heartbeat | Snapshot | Fatal
CoordinatorToStage = Welcome | Peers | Shutdown | Reregister
