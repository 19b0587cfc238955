"""A coordination that checks its own books after every event: what must hold whatever a test is about."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from omni_actors.coordinator.core.instructions import Instruction, ToClient, ToStage
from omni_actors.coordinator.core.lifecycle import RequestMachine
from omni_actors.coordinator.core.observer import Observer
from omni_actors.coordinator.core.requests import ActiveRequest
from omni_actors.errors import OmniError
from omni_actors.protocol.client import Done, Submit
from omni_actors.protocol.common import Failed
from omni_actors.protocol.header import Header, ReplicaId
from omni_actors.protocol.results import StageDone
from omni_actors.protocol.stage import OpenRequest

EVENTS = (
    "submit",
    "reopen",
    "abort",
    "reject",
    "end_client",
    "client_gone",
    "from_stage",
    "reject_from_stage",
    "replica_lost",
    "tick",
    "shut_down",
)


class Onlooker(Observer):
    """What an observer knows of requests that run: by request and stage the attempt that was announced."""

    def __init__(self) -> None:
        self.attempts: dict[str, dict[str, int]] = {}
        self.done: dict[str, dict[str, int]] = {}
        self.ends: collections.Counter[str] = collections.Counter()
        self.losses: list[tuple[str, bool]] = []

    def admitted(self, request_id: str, submit: Submit) -> None:
        assert request_id not in self.attempts, "admitted twice"
        self.attempts[request_id], self.done[request_id] = {}, {}

    def bound(self, request_id: str, attempt: int, route: tuple[ReplicaId, ...], begun: Sequence[str]) -> None:
        assert begun, "bound to nothing new"
        assert set(begun) <= {replica_id.stage for replica_id in route}
        self.attempts[request_id].update(dict.fromkeys(begun, attempt))

    def replayed(self, request_id: str, error: OmniError, counts: bool) -> None:
        assert request_id in self.attempts
        self.losses.append((request_id, counts))

    def stage_done(self, header: Header, body: StageDone) -> None:
        assert self.attempts[header.request_id][header.stage] == header.attempt, "not the attempt it works on"
        self.done[header.request_id][header.stage] = header.attempt

    def ended(self, request_id: str, error: OmniError | None) -> None:
        del self.attempts[request_id]
        self.ends["done" if error is None else error.code.value] += 1


class CheckedCoordination(RequestMachine):
    """Raises `AssertionError` from the event that breaks an invariant."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.onlooker = Onlooker()
        super().__init__(*arguments, observer=self.onlooker, **options)
        self._depth = 0
        self._client_seq: dict[str, int] = {}  # of admitted requests that have not ended
        self._opened: dict[str, set[tuple[ReplicaId, int]]] = {}

    def observe(self, instructions: list[Instruction]) -> None:
        """Messages to clients are numbered and end with the one that says so; clients that are gone get none."""
        for item in instructions:
            if isinstance(item, ToStage):
                replica = self.replicas.at(item.replica_id)
                assert replica is not None, "a message for an unknown epoch"
                assert replica.alive, "a message to the dead"
                if isinstance(item.body, OpenRequest):
                    opened = self._opened.setdefault(item.request_id, set())
                    assert (item.replica_id, item.attempt) not in opened, "opened twice"
                    opened.add((item.replica_id, item.attempt))
            elif item.request_id in self._client_seq and not self._refuses(item):
                assert item.seq == self._client_seq[item.request_id]
                self._client_seq[item.request_id] += 1
                if isinstance(item.body, Done | Failed):
                    del self._client_seq[item.request_id]
                    self._opened.pop(item.request_id, None)
            else:
                assert isinstance(item.body, Failed), "nothing but a refusal for a request that is not admitted"

    def _refuses(self, item: ToClient) -> bool:
        """Whether this is about another use of the id of a request that goes on."""
        request = self._requests.get(item.request_id)
        return request is not None and isinstance(item.body, Failed)

    def check(self) -> None:
        active = {request.request_id for request in self._requests}
        assert len(active) == self.in_flight <= self.pipeline.coordinator.max_in_flight
        assert active == set(self._client_seq), "admitted, not ended and not there, or the other way round"
        assert active == set(self.onlooker.attempts), "an observer sees every admission and every end"
        assert self.replays == sum(counts for _, counts in self.onlooker.losses)
        for replica in self.replicas:
            assert replica.alive or not replica.requests, "a dead replica owns nothing"
            assert replica.computing <= replica.requests <= active
            for request_id in replica.requests:
                request = self._requests[request_id]
                assert request.replica_id(replica.stage) == replica.replica_id
                assert (request_id in replica.computing) == (replica.stage not in request.usage)
            if replica.reserved_for in replica.computing:
                assert replica.computing == {replica.reserved_for}, "a suspect runs alone"
        for stage in self.pipeline.stages:
            free = [item for item in self.replicas if item.stage == stage.name and item.takes_requests]
            best = min(free, key=lambda item: item.preference, default=None)
            assert self.replicas.choose(stage.name) is best
        waiting = {request.request_id for request in self._requests.waiting()}
        for request in self._requests:
            self._check_request(request, request.request_id in waiting)
        kept = [request.retained.size for request in self._requests if request.retained is not None]
        assert self.retained_bytes == sum(kept)

    def _check_request(self, request: ActiveRequest, waits: bool) -> None:
        limit = self.pipeline.coordinator.max_attempts
        assert request.losses_made_up < limit
        assert request.attempt < limit * len(request.stages)
        assert (request.state == "running") == (len(request.route) == len(request.stages))
        assert (request.state == "waiting") == waits
        assert set(request.attempts) == set(request.bound)
        assert set(request.usage) <= set(request.bound)
        assert request.attempts.items() <= self.onlooker.attempts[request.request_id].items()
        for replica_id in request.route:
            replica = self.replicas.at(replica_id)
            assert (replica is not None and replica.alive) or self._planner.is_through_with(request, replica_id.stage)


def _checked(name: str) -> Any:
    def event(self: CheckedCoordination, *arguments: Any, **options: Any) -> list[Instruction]:
        self._depth += 1
        try:
            instructions: list[Instruction] = getattr(RequestMachine, name)(self, *arguments, **options)
        finally:
            self._depth -= 1
        if self._depth:  # a part of another event
            return instructions
        if name == "submit" and arguments[1].request_id in self._requests:
            self._client_seq.setdefault(arguments[1].request_id, 0)
        if name == "client_gone":  # its messages would reach no one
            gone = [item for item in self._client_seq if item not in self._requests]
            assert all(isinstance(item, ToStage) for item in instructions)
            for request_id in gone:
                del self._client_seq[request_id]
                self._opened.pop(request_id, None)
        self.observe(instructions)
        self.check()
        return instructions

    return event


for _name in EVENTS:
    setattr(CheckedCoordination, _name, _checked(_name))
