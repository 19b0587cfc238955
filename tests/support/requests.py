"""Requests for unit tests: a machine that checks its own invariants, its events, and what its instructions say."""

from __future__ import annotations

import array
import collections
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.instructions import Instruction, Observer, ToClient, ToStage
from omni_actors.coordinator.core.replicas import Evidence, ReplicaState
from omni_actors.coordinator.core.request import ActiveRequest
from omni_actors.coordinator.core.requests import RequestMachine
from omni_actors.errors import OmniError
from omni_actors.protocol.fields import ATTEMPTS, DType, Header, ReplicaId, TensorRef, pack_token_ids
from omni_actors.protocol.messages import (
    Abort,
    AudioChunk,
    Done,
    Failed,
    OpenRequest,
    Resend,
    StageDone,
    Submit,
    TextDelta,
)
from omni_actors.protocol.payloads import EngineFacts, Prompt
from tests.support.builders import chain, done, header_from, submit

STAGES = ("prompt", "thinker", "talker", "code2wav")
NOW = 1000.0
ALICE, BOB = b"alice", b"bob"
CHUNK = AudioChunk(samples=TensorRef(DType.F32, (1,), 0), sample_rate=24_000)
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
    "note_congestion",
    "take_beat",
    "shut_down",
)


class Onlooker(Observer):
    """What an observer knows of requests that run: by request and stage the attempt that was announced."""

    def __init__(self) -> None:
        self.attempts: dict[str, dict[str, int]] = {}
        self.done: dict[str, dict[str, int]] = {}
        self.ends: collections.Counter[str] = collections.Counter()
        self.losses: list[tuple[str, bool]] = []

    def admitted(self, header: Header, submit: Submit) -> None:
        assert header.request_id not in self.attempts, "admitted twice"
        self.attempts[header.request_id], self.done[header.request_id] = {}, {}

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


class CheckedRequestMachine(RequestMachine):
    """Raises `AssertionError` from the event that breaks an invariant."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.onlooker = Onlooker()
        super().__init__(*arguments, observer=self.onlooker, **options)
        self._depth = 0
        self._client_seq: dict[str, int] = {}  # of admitted requests that have not ended
        self._opened: dict[str, set[tuple[ReplicaId, int]]] = {}

    def observe(self, instructions: list[Instruction]) -> None:
        """Messages to clients are numbered and end with a terminal one; nothing is sent to dead replicas."""
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
        request = self.active.get(item.request_id)
        return request is not None and isinstance(item.body, Failed)

    def check(self) -> None:
        active = {request.request_id for request in self.active.values()}
        assert len(active) == self.in_flight + self.queued
        assert self.in_flight <= self.pipeline.coordinator.max_in_flight
        assert self.queued <= self.pipeline.coordinator.max_queued
        assert self.queued == sum(request.state == "queued" for request in self.active.values())
        assert active == set(self._client_seq), "admitted, not ended and not there, or the other way round"
        assert active == set(self.onlooker.attempts), "an observer sees every admission and every end"
        assert self.replays == sum(counts for _, counts in self.onlooker.losses)
        for replica in self.replicas:
            assert replica.alive or not replica.requests, "a dead replica owns nothing"
            assert replica.computing <= replica.requests <= active
            for request_id in replica.requests:
                request = self.active[request_id]
                assert request.bound[replica.stage] == replica.replica_id
                assert (request_id in replica.computing) == (replica.stage not in request.usage)
            suspects = [name for name in replica.computing if self.active[name].suspected_by == replica.stage]
            assert replica.reserved or not suspects, "suspects run apart from others"
        for stage in self.pipeline.stages:
            free = [item for item in self.replicas if item.stage == stage.name and item.takes_requests]
            loads = [(item.congested, len(item.computing), len(item.requests), item.index) for item in free]
            best = self.replicas.choose(stage.name)
            assert loads.index(min(loads)) == free.index(best) if free else best is None
        for request in self.active.values():
            self._check_request(request)
        kept = [
            request.retained.size for request in self.active.values() if request.retained and request.state != "queued"
        ]
        assert self.retained.used == sum(kept)

    def _check_request(self, request: ActiveRequest) -> None:
        limit = self.pipeline.coordinator.max_attempts
        assert request.losses_made_up < limit
        assert request.attempt % ATTEMPTS < limit * len(request.stages)
        assert (request.state == "running") == (len(request.route) == len(request.stages))
        assert set(request.attempts) == set(request.bound)
        assert set(request.usage) <= set(request.bound)
        assert request.attempts.items() <= self.onlooker.attempts[request.request_id].items()
        for replica_id in request.route:
            replica = self.replicas.at(replica_id)
            assert (replica is not None and replica.alive) or self.planner.is_through_with(request, replica_id.stage)


def _checked(name: str) -> Any:
    def event(self: CheckedRequestMachine, *arguments: Any, **options: Any) -> list[Instruction]:
        self._depth += 1
        try:
            instructions: list[Instruction] = getattr(RequestMachine, name)(self, *arguments, **options)
        finally:
            self._depth -= 1
        if self._depth:  # a part of another event
            return instructions
        if name == "submit" and arguments[1].request_id in self.active:
            self._client_seq.setdefault(arguments[1].request_id, 0)
        if name == "client_gone":  # there is no client to answer
            gone = [item for item in self._client_seq if item not in self.active]
            assert all(isinstance(item, ToStage) or item.client != arguments[0] for item in instructions)
            for request_id in gone:
                del self._client_seq[request_id]
                self._opened.pop(request_id, None)
        self.observe(instructions)
        self.check()
        return instructions

    return event


for _name in EVENTS:
    setattr(CheckedRequestMachine, _name, _checked(_name))


# -- events -----------------------------------------------------------------------------------------------------------


def ready(replicas: int = 1, outputs: Sequence[str] = ("audio",), **coordinator: object) -> RequestMachine:
    """All replicas of the echo chain are ready. `outputs` are those of its last stage."""
    made = chain()
    made["stages"][-1]["outputs"] = list(outputs)
    config = msgspec.convert({**made, "coordinator": coordinator}, PipelineConfig)
    state = CheckedRequestMachine(config)
    for stage in STAGES:
        for index in range(replicas):
            replica = state.replicas.add(stage, index, 1)
            replica.state = ReplicaState.READY
            if stage == "code2wav":
                replica.facts = EngineFacts(voices=("Chelsie", "Ethan"), sample_rate=24_000)
    return state


def replica_id(stage: str, index: int = 0, epoch: int = 1) -> ReplicaId:
    return ReplicaId(stage, index, epoch)


def ask(
    state: RequestMachine, request_id: str = "r1", client: bytes = ALICE, *modalities: str, **fields: object
) -> list:
    """Submit a request, with a prompt of its own unless one is given."""
    fields.setdefault("prompt", Prompt(token_ids=pack_token_ids([1, 2, zlib.crc32(request_id.encode()) >> 1])))
    return state.submit(client, Header("", request_id), submit(*modalities, **fields), [b"media"], NOW)


def say(
    state: RequestMachine, stage: str, body: object, seq: int = 0, request_id: str = "r1", buffers: tuple = ()
) -> list:
    return state.from_stage(header_from(replica_id(stage), request_id, seq), body, buffers, NOW)


def failure(instructions: list[Instruction]) -> Failed:
    """The one message to the client, which is a failure."""
    (message,) = [item for item in instructions if isinstance(item, ToClient)]
    assert isinstance(message.body, Failed)
    return message.body


def aborts(instructions: list[Instruction]) -> list[str]:
    return [
        item.replica_id.stage for item in instructions if isinstance(item, ToStage) and isinstance(item.body, Abort)
    ]


def letter(index: int) -> TextDelta:
    return TextDelta(text=chr(97 + index % 26), token_ids=pack_token_ids([index]))


def sound(first: int, count: int) -> tuple[AudioChunk, tuple[bytes, ...]]:
    samples = array.array("f", range(first, first + count)).tobytes()
    return AudioChunk(samples=TensorRef(DType.F32, (count,), 0), sample_rate=24_000), (samples,)


def lose(
    state: RequestMachine,
    stage: str,
    index: int = 0,
    restart: bool = True,
    why: str = "killed by signal 9",
    evidence: Evidence = Evidence.CRASHED,
    now: float = NOW,
) -> list[Instruction]:
    replica = state.replicas.current(stage, index)
    replica.on("lost" if restart else "given_up")
    return state.replica_lost(replica, now, why, Evidence.NONE if replica.orders.restart else evidence)


def bring_back(state: RequestMachine, stage: str, index: int = 0, now: float = NOW) -> list[Instruction]:
    before = state.replicas.current(stage, index)
    replica = state.replicas.add(stage, index, before.epoch + 1)
    replica.state = ReplicaState.READY
    return state.reopen(now)


def again(state: RequestMachine, stage: str, body: object, seq: int, epoch: int = 1, attempt: int = 1, **more) -> list:
    header = header_from(replica_id(stage, 0, epoch), "r1", seq, attempt)
    return state.from_stage(header, body, more.get("buffers", ()), NOW)


def finish(state: RequestMachine, request_id: str) -> list[Instruction]:
    """All stages of a request are done; what follows from that."""
    request, instructions = state.active[request_id], []
    for stage in request.stages:
        header = header_from(request.bound[stage], request_id, request.next_seq.get(stage, 0), request.attempts[stage])
        if stage not in request.usage:
            instructions += state.from_stage(header, done(), (), NOW)
    return instructions


# -- what instructions say --------------------------------------------------------------------------------------------


def resends(instructions: list[Instruction]) -> list[tuple[str, str, int]]:
    """Who is asked to give whom its input again, and for which attempt."""
    asked = [item for item in instructions if isinstance(item.body, Resend)]
    return [(item.replica_id.stage, item.body.receiver.stage, item.body.attempt) for item in asked]


def opened_stages(instructions: list[Instruction]) -> list[tuple[str, int]]:
    return [(item.replica_id.stage, item.attempt) for item in instructions if isinstance(item.body, OpenRequest)]


def opened_requests(instructions: list[Instruction]) -> set[str]:
    return {item.request_id for item in instructions if isinstance(item.body, OpenRequest)}
