"""Control channel between a node agent and the coordinator.

An agent's headers have no stage; `replica` is the node's rank. `spawn_epoch` is the epoch that a process was started
with.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from omni_actors.protocol.control import Reregister, Shutdown
from omni_actors.protocol.fields import Count, ReplicaIndex, StageName
from omni_actors.protocol.header import Body


class RunningReplica(Struct, frozen=True, array_like=True):
    """A stage process on a node."""

    stage: StageName
    replica: ReplicaIndex
    spawn_epoch: Count
    pid: int


class NodeHello(Body, tag="node_hello", frozen=True):
    """Node -> coordinator, first message: the processes that run here. `launched`: every replica was ready before.

    `devices` is the number of GPUs of this host. A mismatch of protocol version, package version or configuration hash
    fails the start.
    """

    protocol: int
    package: str
    config: str
    replicas: Annotated[tuple[RunningReplica, ...], Meta(max_length=4096)] = ()
    launched: bool = False
    devices: Count = 0


class NodeWelcome(Body, tag="node_welcome", frozen=True):
    """Coordinator -> node: accepted."""


class NodeBeat(Body, tag="node_beat", frozen=True):
    """Node -> coordinator, and back as the answer: alive."""


class NodeLeaving(Body, tag="node_leaving", frozen=True):
    """Node -> coordinator: this node and its processes end.

    With `drains` they end once its replicas have finished what they hold: the coordinator then answers with `Shutdown`.
    """

    reason: Annotated[str, Meta(max_length=16384)] = ""
    drains: bool = False


class StartReplica(Body, tag="start_replica", frozen=True):
    """Coordinator -> node: start a process. `slot` says which of the stage's GPUs it takes there."""

    stage: StageName
    replica: ReplicaIndex
    spawn_epoch: Annotated[int, Meta(ge=1)]
    slot: ReplicaIndex = 0


class KillReplica(Body, tag="kill_replica", frozen=True):
    """Coordinator -> node: send SIGKILL to a process. Its end is reported like any other."""

    stage: StageName
    replica: ReplicaIndex
    spawn_epoch: Count


class ReplicaEnded(Body, tag="replica_ended", frozen=True):
    """Node -> coordinator: a process ended or could not be started, as `how` says. `log` is the end of its log.

    `exit_code` is negative for a signal, and `None` if there was no process.
    """

    stage: StageName
    replica: ReplicaIndex
    spawn_epoch: Count
    how: Annotated[str, Meta(max_length=4096)]
    log: Annotated[str, Meta(max_length=65536)] = ""
    exit_code: int | None = None


class Launched(Body, tag="launched", frozen=True):
    """Coordinator -> node: every replica is ready."""


NodeToCoordinator = NodeHello | NodeBeat | NodeLeaving | ReplicaEnded
CoordinatorToNode = NodeWelcome | NodeBeat | StartReplica | KillReplica | Launched | Shutdown | Reregister
