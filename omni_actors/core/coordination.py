"""The coordinator's decisions: events in, instructions out. No socket, no clock, no event loop.

A request lives in `_requests` from its admission to its one terminal message (`Done` or `Failed`); after that a
tombstone absorbs what still arrives about it.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from omni_actors.codec import Frame
from omni_actors.config import PipelineConfig
from omni_actors.core.admission import admit
from omni_actors.core.replicas import Replica, ReplicaState, ReplicaTable
from omni_actors.core.tombstones import Tombstones
from omni_actors.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    OmniError,
    Overloaded,
    ProtocolError,
    StageLost,
    StageUnavailable,
)
from omni_actors.messages import (
    Abort,
    AudioChunk,
    Body,
    Done,
    Expect,
    Failed,
    Header,
    Hop,
    StageDone,
    StageParams,
    StageUsage,
    Submit,
    TextDelta,
)

RETRY_AFTER_SECONDS = 1.0


@dataclass(frozen=True)
class ToClient:
    """Send `body` to a client."""

    client: bytes
    request_id: str
    seq: int
    body: Body
    buffers: Sequence[Frame] = ()


@dataclass(frozen=True)
class ToStage:
    """Send `body` to the inbox of a replica."""

    hop: Hop
    request_id: str
    attempt: int
    deadline: float
    body: Body
    buffers: Sequence[Frame] = ()


Instruction = ToClient | ToStage


@dataclass
class ActiveRequest:
    """A request between admission and its terminal message."""

    request_id: str
    client: bytes
    route: tuple[Hop, ...]
    modalities: frozenset[str]
    deadline: float
    attempt: int = 0
    client_seq: int = 0
    next_seq: dict[str, int] = field(default_factory=dict)
    usage: dict[str, StageUsage] = field(default_factory=dict)

    def hop(self, stage: str) -> Hop | None:
        return next((hop for hop in self.route if hop.stage == stage), None)


class Coordination:
    """Owns requests and replicas.

    Args:
        new_seed: gives the seed of a request that brings none.
    """

    def __init__(self, pipeline: PipelineConfig, new_seed: Callable[[], int]) -> None:
        self.pipeline = pipeline
        self.replicas = ReplicaTable()
        self.dropped: collections.Counter[str] = collections.Counter()
        self._new_seed = new_seed
        self._requests: dict[str, ActiveRequest] = {}
        self._closing = False
        self._tombstones = Tombstones(pipeline.coordinator.tombstone_ttl)

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def clients(self) -> set[bytes]:
        """Those with requests in flight."""
        return {request.client for request in self._requests.values()}

    def requests_of(self, client: bytes) -> tuple[str, ...]:
        """The ids of a client's requests in flight."""
        return tuple(request.request_id for request in self._requests.values() if request.client == client)

    @property
    def voices(self) -> tuple[str, ...]:
        """All voices that the loaded stages know."""
        return tuple(dict.fromkeys(voice for replica in self.replicas for voice in replica.voices))

    @property
    def sample_rate(self) -> int:
        return max((replica.sample_rate for replica in self.replicas), default=0)

    # -- clients ------------------------------------------------------------------------------------------------------

    def submit(
        self, client: bytes, header: Header, submit: Submit, buffers: Sequence[Frame], now: float
    ) -> list[Instruction]:
        """Admit a request and open it in every stage of its route, or refuse it with one `Failed`."""
        try:
            request, params = self._admit(client, header, submit, now)
        except OmniError as error:
            return [ToClient(client, header.request_id, 0, Failed.from_error(error))]
        return self._open(request, params, submit, buffers)

    def _admit(
        self, client: bytes, header: Header, submit: Submit, now: float
    ) -> tuple[ActiveRequest, dict[str, StageParams]]:
        request_id = header.request_id
        if self._closing:
            raise _shutting_down()
        if not request_id:
            raise InvalidRequest("The request has no id.")
        if request_id in self._requests or request_id in self._tombstones:
            raise InvalidRequest(f"The request id {request_id!r} was used before.", hint="Use a new id per request.")
        limit = self.pipeline.coordinator.max_in_flight
        if self.in_flight >= limit:
            raise Overloaded(
                f"{self.in_flight} requests are in flight, the limit is {limit}.", retry_after=RETRY_AFTER_SECONDS
            )
        if not math.isfinite(header.deadline):
            raise InvalidRequest(f"The deadline {header.deadline} is no point in time.")
        latest = self.pipeline.coordinator.max_timeout
        if header.deadline > now + latest:
            away = f"{header.deadline - now:.0f} s"
            raise InvalidRequest(f"The deadline is {away} away; at most {latest:g} s are allowed.")
        deadline = header.deadline or now + min(self.pipeline.coordinator.default_timeout, latest)
        if deadline <= now:
            raise DeadlineExceeded("The deadline had passed before the request arrived.")
        admitted = admit(self.pipeline, submit, self.voices)
        route = []
        for stage in admitted.stages:
            replica = self.replicas.choose(stage)
            if replica is None:
                raise StageUnavailable(f"No replica of stage {stage!r} is ready.", stage=stage)
            if replica.congested:
                raise Overloaded(
                    f"Stage {stage!r} takes no more input for now.", stage=stage, retry_after=RETRY_AFTER_SECONDS
                )
            route.append(replica)
        for replica in route:
            replica.requests.add(request_id)
        request = ActiveRequest(
            request_id, client, tuple(replica.hop for replica in route), admitted.modalities, deadline
        )
        self._requests[request_id] = request
        return request, admitted.params

    def _open(
        self, request: ActiveRequest, params: dict[str, StageParams], submit: Submit, buffers: Sequence[Frame]
    ) -> list[Instruction]:
        seed = submit.seed if submit.seed is not None else self._new_seed()
        instructions: list[Instruction] = []
        # Later stages first: their expectation should be there before the first output of the stage before them.
        for hop in reversed(request.route):
            is_entry = hop.stage == self.pipeline.entry.name
            body = Expect(
                route=request.route,
                params=params[hop.stage],
                seed=seed,
                voice=submit.voice,
                priority=submit.priority,
                prompt=submit.prompt if is_entry else None,
            )
            instructions.append(self._to_stage(request, hop, body, buffers if is_entry else ()))
        return instructions

    def abort(self, client: bytes, request_id: str, now: float) -> list[Instruction]:
        """A client ends its own request. Idempotent; requests of others are not touched."""
        request = self._requests.get(request_id)
        if request is None or request.client != client:
            self.dropped["abort_of_unknown_request"] += 1
            return []
        return self._fail(request, Aborted("The client aborted the request."), now)

    def reject(self, client: bytes, header: Header, error: OmniError, now: float) -> list[Instruction]:
        """A client's message did not decode: tell it, and end the request if it exists."""
        request = self._requests.get(header.request_id)
        if request is not None and request.client == client:
            return self._fail(request, error, now)
        return [ToClient(client, header.request_id, 0, Failed.from_error(error))]

    def client_slow(self, client: bytes, error: OmniError, now: float) -> list[Instruction]:
        """Too much waits for a client that does not read: its requests end, and it is told when it reads again."""
        slow = [request for request in self._requests.values() if request.client == client]
        return [instruction for request in slow for instruction in self._fail(request, error, now)]

    def client_gone(self, client: bytes, now: float) -> list[Instruction]:
        """A client cannot be reached any more: its requests end."""
        gone = [request for request in self._requests.values() if request.client == client]
        error = Aborted("The client is gone.")
        return [
            instruction
            for request in gone
            for instruction in self._fail(request, error, now)
            if isinstance(instruction, ToStage)
        ]

    # -- stages -------------------------------------------------------------------------------------------------------

    def from_stage(
        self, header: Header, body: TextDelta | AudioChunk | StageDone | Failed, buffers: Sequence[Frame], now: float
    ) -> list[Instruction]:
        """A result of a stage: forward it, note it, or drop it if it is late or foreign."""
        request = self._expected_sender(header)
        if request is None:
            return []
        expected = request.next_seq.get(header.stage, 0)
        # A failure may be about the very message that is missing.
        if header.seq != expected and not isinstance(body, Failed):
            error = ProtocolError(
                f"Stage {header.stage!r} sent message {header.seq} where {expected} was due.", stage=header.stage
            )
            return self._fail(request, error, now)
        request.next_seq[header.stage] = expected + 1
        if isinstance(body, Failed):
            return self._fail(request, body.to_error(), now)
        if isinstance(body, StageDone):
            return self._stage_done(request, header.stage, body.usage, now)
        return self._forward(request, header.stage, body, buffers)

    def reject_from_stage(self, header: Header, error: OmniError, now: float) -> list[Instruction]:
        """A stage's message did not decode: its request ends."""
        request = self._expected_sender(header)
        return self._fail(request, error, now) if request is not None else []

    def _expected_sender(self, header: Header) -> ActiveRequest | None:
        request = self._requests.get(header.request_id)
        if request is None:
            self.dropped["late" if header.request_id in self._tombstones else "unknown_request"] += 1
            return None
        if request.hop(header.stage) != Hop(header.stage, header.replica, header.epoch):
            self.dropped["foreign_epoch"] += 1
            return None
        if header.attempt != request.attempt:
            self.dropped["foreign_attempt"] += 1
            return None
        return request

    def _forward(
        self, request: ActiveRequest, stage: str, body: TextDelta | AudioChunk, buffers: Sequence[Frame]
    ) -> list[Instruction]:
        modality = "text" if isinstance(body, TextDelta) else "audio"
        if modality not in request.modalities or modality not in self.pipeline.stage(stage).outputs:
            return []
        return [self._to_client(request, body, buffers)]

    def _stage_done(self, request: ActiveRequest, stage: str, usage: StageUsage, now: float) -> list[Instruction]:
        request.usage[stage] = usage
        if len(request.usage) < len(request.route):
            return []
        done = self._to_client(request, Done(usage=request.usage))
        self._close(request, now)
        return [done]

    # -- replicas -----------------------------------------------------------------------------------------------------

    def replica_lost(self, replica: Replica, now: float, why: str) -> list[Instruction]:
        """A process is dead: its requests fail, their other stages drop them."""
        replica.state = ReplicaState.DEAD
        error = StageLost(f"{replica.name} (epoch {replica.epoch}) died: {why}.", stage=replica.stage)
        held = [self._requests[request_id] for request_id in sorted(replica.requests) if request_id in self._requests]
        return [instruction for request in held for instruction in self._fail(request, error, now)]

    def tick(self, now: float) -> list[Instruction]:
        """Ends requests whose deadline has passed. Call it a few times a second."""
        self._tombstones.expire(now)
        late = [request for request in self._requests.values() if request.deadline <= now]
        return [
            instruction
            for request in late
            for instruction in self._fail(request, DeadlineExceeded("The request's deadline has passed."), now)
        ]

    def shut_down(self, now: float) -> list[Instruction]:
        """Ends every request and admits none any more; each client gets its answer."""
        self._closing = True
        return [
            instruction
            for request in list(self._requests.values())
            for instruction in self._fail(request, _shutting_down(), now)
        ]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _fail(self, request: ActiveRequest, error: OmniError, now: float) -> list[Instruction]:
        """The one way in which a request ends badly: tell the client once, and every stage of the route."""
        instructions: list[Instruction] = [self._to_client(request, Failed.from_error(error))]
        for hop in request.route:
            replica = self.replicas.find(hop.stage, hop.replica, hop.epoch)
            if replica is not None and replica.state is not ReplicaState.DEAD:
                instructions.append(self._to_stage(request, hop, Abort()))
        self._close(request, now)
        return instructions

    def _close(self, request: ActiveRequest, now: float) -> None:
        del self._requests[request.request_id]
        self.replicas.release(request.request_id, request.route)
        self._tombstones.add(request.request_id, now)

    def _to_client(self, request: ActiveRequest, body: Body, buffers: Sequence[Frame] = ()) -> ToClient:
        seq = request.client_seq
        request.client_seq += 1
        return ToClient(request.client, request.request_id, seq, body, buffers)

    @staticmethod
    def _to_stage(request: ActiveRequest, hop: Hop, body: Body, buffers: Sequence[Frame] = ()) -> ToStage:
        return ToStage(hop, request.request_id, request.attempt, request.deadline, body, buffers)


def _shutting_down() -> StageUnavailable:
    return StageUnavailable("The pipeline is shutting down.", hint="Send the request to another pipeline.")
