"""Control channel between a node agent and the coordinator. Its header has no stage; `replica` is the node's rank."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from omni_actors.protocol.control import Reregister, Shutdown
from omni_actors.protocol.fields import Count
from omni_actors.protocol.header import Body


class RunningReplica(Struct, frozen=True, array_like=True):
    """A process of a node. `spawn_epoch` is the epoch with which it was started."""

    stage: Annotated[str, Meta(min_length=1, max_length=64)]
    replica: Annotated[int, Meta(ge=0, le=65535)]
    spawn_epoch: Count
    pid: int


class NodeHello(Body, tag="node_hello", frozen=True):
    """Node -> coordinator, first message: which processes run here. `launched`: the node served before."""

    protocol: int
    package: str
    config: str
    replicas: Annotated[tuple[RunningReplica, ...], Meta(max_length=4096)] = ()
    launched: bool = False


class NodeWelcome(Body, tag="node_welcome", frozen=True):
    """Coordinator -> node: accepted."""


class NodeBeat(Body, tag="node_beat", frozen=True):
    """Node -> coordinator, and back as the answer: alive."""


class NodeLeaving(Body, tag="node_leaving", frozen=True):
    """Node -> coordinator: this node ends, and its processes with it."""

    reason: Annotated[str, Meta(max_length=16384)] = ""


class StartReplica(Body, tag="start_replica", frozen=True):
    """Coordinator -> node: start a process, with `spawn_epoch` as its first epoch."""

    stage: Annotated[str, Meta(min_length=1, max_length=64)]
    replica: Annotated[int, Meta(ge=0, le=65535)]
    spawn_epoch: Annotated[int, Meta(ge=1)]


class KillReplica(Body, tag="kill_replica", frozen=True):
    """Coordinator -> node: SIGKILL to a process; its end is reported as any other."""

    stage: Annotated[str, Meta(min_length=1, max_length=64)]
    replica: Annotated[int, Meta(ge=0, le=65535)]
    spawn_epoch: Count


class ReplicaEnded(Body, tag="replica_ended", frozen=True):
    """Node -> coordinator: a process has ended, or could not be started. `log` is the end of its log."""

    stage: Annotated[str, Meta(min_length=1, max_length=64)]
    replica: Annotated[int, Meta(ge=0, le=65535)]
    spawn_epoch: Count
    how: Annotated[str, Meta(max_length=4096)]
    log: Annotated[str, Meta(max_length=65536)] = ""


class Launched(Body, tag="launched", frozen=True):
    """Coordinator -> node: every replica is ready."""


NodeToCoordinator = NodeHello | NodeBeat | NodeLeaving | ReplicaEnded
CoordinatorToNode = NodeWelcome | NodeBeat | StartReplica | KillReplica | Launched | Shutdown | Reregister
