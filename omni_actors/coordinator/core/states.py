"""Transition tables of replicas, nodes, the launch and requests: what is not in them cannot happen.

`scripts/state_diagrams.py` draws them into `docs/architecture.md`.
"""

from __future__ import annotations

import enum
import signal


class ReplicaState(enum.StrEnum):
    """Where a replica is between the start of its process and the end of its last restart."""

    STARTING = "starting"  # spawned, has not said hello
    LOADING = "loading"  # said hello, loads its model
    READY = "ready"
    DRAINING = "draining"  # finishes what it holds, accepts nothing new
    WAITING = "waiting"  # its process is gone; another one starts after the back-off
    DEAD = "dead"  # its process is gone, and no restart is planned


class ReplicaEvent(enum.StrEnum):
    """What can happen to a replica."""

    HELLO = "hello"
    READY = "ready"
    DRAIN = "drain"
    STAY = "stay"  # an operator wants it after all
    LOST = "lost"  # a restart follows
    GIVEN_UP = "given_up"  # lost, and no restart follows
    REVIVED = "revived"  # an operator asked for a restart
    SPAWNED = "spawned"  # a new process, with a new epoch


_ALIVE = (ReplicaState.STARTING, ReplicaState.LOADING, ReplicaState.READY, ReplicaState.DRAINING)

REPLICA_TRANSITIONS: dict[tuple[ReplicaState, ReplicaEvent], ReplicaState] = {
    (ReplicaState.STARTING, ReplicaEvent.HELLO): ReplicaState.LOADING,
    (ReplicaState.LOADING, ReplicaEvent.READY): ReplicaState.READY,
    (ReplicaState.READY, ReplicaEvent.DRAIN): ReplicaState.DRAINING,
    (ReplicaState.DRAINING, ReplicaEvent.DRAIN): ReplicaState.DRAINING,
    (ReplicaState.DRAINING, ReplicaEvent.STAY): ReplicaState.READY,
    **{(state, ReplicaEvent.LOST): ReplicaState.WAITING for state in _ALIVE},
    **{(state, ReplicaEvent.GIVEN_UP): ReplicaState.DEAD for state in (*_ALIVE, ReplicaState.WAITING)},
    (ReplicaState.WAITING, ReplicaEvent.SPAWNED): ReplicaState.STARTING,
    (ReplicaState.DEAD, ReplicaEvent.REVIVED): ReplicaState.WAITING,
}


class NodeState(enum.StrEnum):
    """Whether a node's agent is there."""

    EXPECTED = "expected"  # the pipeline needs it; it has not said hello to this coordinator
    PRESENT = "present"
    DRAINING = "draining"  # it stops: its replicas finish what they hold, and none starts there
    LEAVING = "leaving"  # that is done, and it was told to end
    AWAY = "away"  # it left or fell silent; its replicas count as dead until it is back


class NodeEvent(enum.StrEnum):
    """What can happen to a node."""

    HELLO = "hello"
    DRAIN = "drain"
    RELEASED = "released"  # nothing is left to finish
    LOST = "lost"


NODE_TRANSITIONS: dict[tuple[NodeState, NodeEvent], NodeState] = {
    **{(state, NodeEvent.HELLO): NodeState.PRESENT for state in NodeState},
    (NodeState.PRESENT, NodeEvent.DRAIN): NodeState.DRAINING,
    (NodeState.DRAINING, NodeEvent.RELEASED): NodeState.LEAVING,
    **{(state, NodeEvent.LOST): NodeState.AWAY for state in NodeState},
}


class LaunchState(enum.StrEnum):
    """Where the whole pipeline is between its start and its end."""

    STARTING = "starting"
    LAUNCHED = "launched"  # every replica has been ready, under this coordinator or one before it
    DRAINING = "draining"  # no new requests; those in flight may finish
    STOPPING = "stopping"  # requests are answered, processes are shut down, nothing starts again
    FAILED = "failed"  # as stopping, and the launcher exits with an error


class LaunchEvent(enum.StrEnum):
    """What can happen to the pipeline."""

    ALL_READY = "all_ready"
    STOP = "stop"  # a signal or an operator's shutdown
    FAIL = "fail"
    END = "end"  # nothing is in flight, or the drain timeout has passed


LAUNCH_TRANSITIONS: dict[tuple[LaunchState, LaunchEvent], LaunchState] = {
    (LaunchState.STARTING, LaunchEvent.ALL_READY): LaunchState.LAUNCHED,
    (LaunchState.STARTING, LaunchEvent.FAIL): LaunchState.FAILED,
    (LaunchState.STARTING, LaunchEvent.STOP): LaunchState.STOPPING,
    (LaunchState.LAUNCHED, LaunchEvent.STOP): LaunchState.DRAINING,
    (LaunchState.STARTING, LaunchEvent.END): LaunchState.STOPPING,
    (LaunchState.LAUNCHED, LaunchEvent.END): LaunchState.STOPPING,
    (LaunchState.DRAINING, LaunchEvent.END): LaunchState.STOPPING,
}


class RequestState(enum.StrEnum):
    """Where a request is between its admission and its terminal message."""

    QUEUED = "queued"  # admitted; waits for a slot
    WAITING = "waiting"  # has a slot; a stage that it needs is not ready
    RUNNING = "running"  # bound to one replica of every stage of its route
    DONE = "done"
    FAILED = "failed"


class RequestEvent(enum.StrEnum):
    """What can happen to a request."""

    GRANTED = "granted"  # a slot
    OPENED = "opened"
    REPLAYED = "replayed"  # a replica of its route was lost: a new attempt
    COMPLETED = "completed"
    FAILED = "failed"


REQUEST_TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.QUEUED, RequestEvent.GRANTED): RequestState.WAITING,
    (RequestState.WAITING, RequestEvent.OPENED): RequestState.RUNNING,
    (RequestState.RUNNING, RequestEvent.REPLAYED): RequestState.WAITING,
    (RequestState.RUNNING, RequestEvent.COMPLETED): RequestState.DONE,
    (RequestState.RUNNING, RequestEvent.FAILED): RequestState.FAILED,
    (RequestState.WAITING, RequestEvent.FAILED): RequestState.FAILED,
    (RequestState.QUEUED, RequestEvent.FAILED): RequestState.FAILED,
}


# A stage that is ended by SIGTERM while it loads exits with 128 + its number.
_FROM_OUTSIDE = {0, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT, -signal.SIGHUP}


class Evidence(enum.IntEnum):
    """How much one loss counts. Two kills count as much as one crash."""

    NONE = 0  # its node was lost, it registered again, or its restart was asked for
    KILLED = 1  # by an operator, or by the kernel because memory ran out, which a request may have caused
    CRASHED = 2  # it failed by itself, or hung


def evidence_of(exit_code: int | None) -> Evidence:
    """Judge the end of a process. The code is that of `multiprocessing`; `None` if it is not known."""
    return Evidence.KILLED if exit_code is None or exit_code in _FROM_OUTSIDE else Evidence.CRASHED
