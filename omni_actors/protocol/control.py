"""Control channel between a stage process and the coordinator."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from omni_actors.protocol.fields import Count, Endpoint, EndpointOrEmpty, Moment, Name
from omni_actors.protocol.header import Body, ReplicaId
from omni_actors.protocol.payloads import MAX_PARAMETERS, Parameter, SpeechAbility
from omni_actors.protocol.telemetry import Snapshot


class ArenaAddress(Struct, frozen=True, array_like=True):
    """The shared memory of process `pid`: its file `descriptor`, of `size` bytes, the first 16 being `token`."""

    pid: Annotated[int, Meta(ge=1, le=2**31)]
    descriptor: Annotated[int, Meta(ge=0, le=2**31)]
    size: Annotated[int, Meta(ge=1, le=2**46)]
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]


class Hello(Body, tag="hello", frozen=True):
    """Stage -> coordinator, first message: registers a replica, whose id is in the header.

    A mismatch of protocol version, package version or configuration hash fails the start. A process that has lost its
    coordinator says hello again with the next epoch; `spawn_epoch` stays the epoch that it was started with. `remote`
    is the inbox for other nodes, "" if none can reach it.
    """

    protocol: int
    package: str
    config: str
    pid: int
    inbox: Endpoint
    arena: ArenaAddress | None = None
    spawn_epoch: Count = 0
    remote: EndpointOrEmpty = ""


class Welcome(Body, tag="welcome", frozen=True):
    """Coordinator -> stage: accepted; send results to this endpoint."""

    results: Endpoint


class Loading(Body, tag="loading", frozen=True):
    """Stage -> coordinator: what the start-up is doing now, for people to read."""

    phase: Annotated[str, Meta(max_length=256)]


class Ready(Body, tag="ready", frozen=True):
    """Stage -> coordinator: the engine takes requests, `seconds` after its start-up began.

    `phases` are the parts of that time by name. The rest are facts about the model, empty or 0 where they do not apply:
    voices, `sample_rate` in Hz, the longest input in tokens, the names of the additional information that this stage
    wants, how many media a prompt may have, by modality, the parameters that the model declares, and what a stage that
    speaks a given text can do.
    """

    seconds: float
    voices: tuple[str, ...] = ()
    sample_rate: int = 0
    max_input_tokens: int = 0
    wants_information: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    phases: Annotated[dict[Name, float], Meta(max_length=64)] = {}
    max_media: dict[Name, Count] = {}
    parameters: Annotated[tuple[Parameter, ...], Meta(max_length=MAX_PARAMETERS)] | None = None
    speech: SpeechAbility | None = None


class Peer(Struct, frozen=True, array_like=True):
    """A neighbour of a replica in the stage graph: its inbox, and its arena if it is on the same host."""

    stage: str
    replica: int
    epoch: int
    inbox: str
    arena: ArenaAddress | None = None

    @property
    def replica_id(self) -> ReplicaId:
        """Identity of the replica in the epoch in which it listens at this address."""
        return ReplicaId(self.stage, self.replica, self.epoch)


class Peers(Body, tag="peers", frozen=True):
    """Coordinator -> stage: all replicas after it (`peers`) and before it (`sources`) that are up now."""

    peers: tuple[Peer, ...]
    sources: tuple[Peer, ...] = ()


class Heartbeat(Body, tag="heartbeat", frozen=True):
    """Stage -> coordinator: alive. `progress` counts iterations of the engine loop, `counts` what the stage holds.

    The coordinator compares clocks by `sent`. `listeners`: for so many at a time the stage makes sound as fast as they
    hear it; 0 if it makes none or cannot tell.
    """

    progress: Count
    counts: dict[str, int] = {}
    sent: Moment = 0.0
    listeners: Count = 0


class Shutdown(Body, tag="shutdown", frozen=True):
    """Coordinator -> stage or node: end, and abort what is in flight. `failed`: the launch failed, for `reason`."""

    reason: str = ""
    failed: bool = False


class Reregister(Body, tag="reregister", frozen=True):
    """Coordinator -> stage or node: unknown sender; say hello again."""


class Fatal(Body, tag="fatal", frozen=True):
    """Stage -> coordinator: this process is about to end, for the reason in `message`."""

    message: Annotated[str, Meta(max_length=16384)]


StageToCoordinator = Hello | Loading | Ready | Heartbeat | Snapshot | Fatal
CoordinatorToStage = Welcome | Peers | Shutdown | Reregister
