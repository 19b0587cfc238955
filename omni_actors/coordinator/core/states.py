"""The life of a replica and of a request as tables: what is not in them does not happen.

`scripts/state_diagrams.py` draws both into `docs/state-machines.md`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from omni_actors.errors import ProtocolError


class ReplicaState(enum.StrEnum):
    STARTING = "starting"  # spawned, has not said hello
    LOADING = "loading"  # said hello, loads its model
    READY = "ready"
    DRAINING = "draining"  # works off what it holds, takes nothing new
    WAITING = "waiting"  # its process is gone and is started anew after a while
    DEAD = "dead"  # its process is gone for good


class ReplicaEvent(enum.StrEnum):
    HELLO = "hello"
    READY = "ready"
    DRAIN = "drain"
    LOST = "lost"  # a restart follows
    GIVEN_UP = "given_up"  # lost, and no restart follows
    REVIVED = "revived"  # somebody asked for it
    SPAWNED = "spawned"  # a new life, with a new epoch


_ALIVE = (ReplicaState.STARTING, ReplicaState.LOADING, ReplicaState.READY, ReplicaState.DRAINING)

REPLICA_TRANSITIONS: dict[tuple[ReplicaState, ReplicaEvent], ReplicaState] = {
    (ReplicaState.STARTING, ReplicaEvent.HELLO): ReplicaState.LOADING,
    (ReplicaState.LOADING, ReplicaEvent.READY): ReplicaState.READY,
    (ReplicaState.READY, ReplicaEvent.DRAIN): ReplicaState.DRAINING,
    (ReplicaState.DRAINING, ReplicaEvent.DRAIN): ReplicaState.DRAINING,
    **{(state, ReplicaEvent.LOST): ReplicaState.WAITING for state in _ALIVE},
    **{(state, ReplicaEvent.GIVEN_UP): ReplicaState.DEAD for state in _ALIVE},
    (ReplicaState.WAITING, ReplicaEvent.SPAWNED): ReplicaState.STARTING,
    (ReplicaState.DEAD, ReplicaEvent.REVIVED): ReplicaState.WAITING,
}


class RequestState(enum.StrEnum):
    WAITING = "waiting"  # admitted; a stage that it needs is not ready
    RUNNING = "running"  # bound to one replica of every stage of its route
    DONE = "done"
    FAILED = "failed"


class RequestEvent(enum.StrEnum):
    OPENED = "opened"
    REPLAYED = "replayed"  # a replica of its route was lost: a new attempt
    COMPLETED = "completed"
    FAILED = "failed"


REQUEST_TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.WAITING, RequestEvent.OPENED): RequestState.RUNNING,
    (RequestState.RUNNING, RequestEvent.REPLAYED): RequestState.WAITING,
    (RequestState.RUNNING, RequestEvent.COMPLETED): RequestState.DONE,
    (RequestState.RUNNING, RequestEvent.FAILED): RequestState.FAILED,
    (RequestState.WAITING, RequestEvent.FAILED): RequestState.FAILED,
}

S = TypeVar("S", bound=enum.StrEnum)
E = TypeVar("E", bound=enum.StrEnum)


def advance(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """The state after `event`; raises `ProtocolError` for an event that has no place in `state`."""
    following = table.get((state, event))
    if following is None:
        raise ProtocolError(f"{event.value} cannot happen while {state.value}.")
    return following


def mermaid(table: Mapping[tuple[S, E], S], initial: S) -> str:
    """A table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {initial.value}"]
    lines += [f"    {state.value} --> {after.value}: {event.value}" for (state, event), after in table.items()]
    ends = {after for after in table.values()} - {state for state, _ in table}
    lines += [f"    {state.value} --> [*]" for state in sorted(ends)]
    return "\n".join(lines)
