"""Finds the request that crashes replicas. A request is declared poison only if it was running alone at the crash.

A request that two replicas of a stage were computing when they died is a suspect. If it was the only one the second
time, it is the culprit. Otherwise it runs once more in isolation: a replica of that stage takes nothing new until it is
empty, then only this request, one suspect at a time. If that replica dies too, the request is to blame, and crashes
it explains no longer count against the requests that ran with it. Other requests run between two isolation runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.requests import ActiveRequest, Loss
from omni_actors.errors import Poison

LOSSES = 2  # replicas of one stage that died while they computed a request: no longer an accident


def record_crash(held: Sequence[ActiveRequest], replica: Replica, why: str) -> ActiveRequest | None:
    """Record the loss of a replica in the requests it held, mark the suspects, and return the culprit, if any."""
    stage = replica.stage
    computing = [request for request in held if stage not in request.usage]
    for request in held:
        request.losses.append(Loss(replica.replica_id, why, request in computing))
    suspects = [request for request in computing if request.losses_of(stage) >= LOSSES]
    if len(computing) == 1 and suspects:
        return suspects[0]
    for request in suspects:
        request.suspected_by = stage
    return None


def clear_others(culprit: ActiveRequest, others: Iterable[ActiveRequest]) -> list[ActiveRequest]:
    """Stop counting crashes that the culprit explains. Returns the requests that are no longer suspected."""
    cleared = []
    explained = {loss.replica_id for loss in culprit.losses if loss.computing}
    for request in others:
        if request is culprit or not request.losses:
            continue
        request.losses = [
            dataclasses.replace(loss, computing=loss.computing and loss.replica_id not in explained)
            for loss in request.losses
        ]
        if request.suspected_by is not None and request.losses_of(request.suspected_by) < LOSSES:
            request.suspected_by = None
            cleared.append(request)
    return cleared


def poison(request: ActiveRequest, stage: str) -> Poison:
    """The error of a request that is blamed for the deaths of a stage's replicas."""
    text = f"{request.losses_of(stage)} replicas died while they computed this request: {request.history()}."
    return Poison(text, stage=stage)


class IsolationRuns:
    """Replicas that are kept free for a suspect, at most one per stage at a time."""

    def __init__(self, replicas: ReplicaTable) -> None:
        self._replicas = replicas
        self._reserved: dict[str, Replica] = {}  # by stage
        self.ended = False  # a replica is free for others again

    def replica_for(self, request: ActiveRequest, stage: str) -> Replica | None:
        """The replica that the suspect has to itself; `None` if none is empty yet."""
        reserved = self._reserved.get(stage)
        if reserved is not None and not (self._replicas.is_current(reserved) and reserved.ready):
            self._release(stage)
            reserved = None
        if reserved is None:
            reserved = self._replicas.choose(stage)
            if reserved is None:
                return None
            reserved.reserved_for = request.request_id
            self._reserved[stage] = reserved
        mine = reserved.reserved_for == request.request_id
        return reserved if mine and not reserved.computing else None

    def end(self, request: ActiveRequest) -> None:
        """Free the replicas reserved for a suspect that has ended, has passed, or runs again."""
        for stage, replica in list(self._reserved.items()):
            if replica.reserved_for == request.request_id:
                self._release(stage)

    def _release(self, stage: str) -> None:
        self._reserved.pop(stage).reserved_for = ""
        self.ended = True

    @property
    def running(self) -> bool:
        """Whether a replica is reserved for a suspect."""
        return bool(self._reserved)
