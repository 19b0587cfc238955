"""The coordinator's decisions: events in, instructions out. No socket, no clock, no event loop.

A request lives in `_requests` from its admission to its one terminal message (`Done` or `Failed`); after that a
tombstone absorbs what still arrives about it. When a replica of its route is lost it runs again from its start, with
the next attempt number and the same seed; what the client has already is left out (`core/delivery.py`).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from omni_actors.codec import Frame
from omni_actors.config import LossPolicy, PipelineConfig
from omni_actors.core.admission import admit
from omni_actors.core.delivery import Delivery, diverged
from omni_actors.core.replicas import Replica, ReplicaTable
from omni_actors.core.states import (
    REQUEST_TRANSITIONS,
    ReplicaEvent,
    RequestEvent,
    RequestState,
    advance,
)
from omni_actors.core.tombstones import Tombstones
from omni_actors.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    OmniError,
    Overloaded,
    Poison,
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
    RequestStatus,
    StageDone,
    StageParams,
    StageUsage,
    Submit,
    TextDelta,
)

RETRY_AFTER_SECONDS = 1.0
POISON_LOSSES = 2  # replicas of one stage that died while they computed a request: it is no accident any more
LISTED_REQUESTS = 1000


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


@dataclass(frozen=True)
class Loss:
    """A replica that died while it held a request. `computing`: its stage had not finished the request."""

    stage: str
    replica: str
    why: str
    computing: bool

    def __str__(self) -> str:
        return f"{self.replica}: {self.why}"


@dataclass(frozen=True)
class Retained:
    """What it takes to run a request again."""

    submit: Submit
    buffers: Sequence[Frame]
    params: dict[str, StageParams]
    seed: int
    size: int  # bytes that count for the budget


@dataclass
class ActiveRequest:
    """A request between admission and its terminal message."""

    request_id: str
    client: bytes
    stages: tuple[str, ...]
    modalities: frozenset[str]
    deadline: float
    retained: Retained | None = None
    state: RequestState = RequestState.WAITING
    route: tuple[Hop, ...] = ()  # empty while it waits
    attempt: int = 0
    client_seq: int = 0
    next_seq: dict[str, int] = field(default_factory=dict)
    usage: dict[str, StageUsage] = field(default_factory=dict)
    delivery: Delivery = field(default_factory=Delivery)
    losses: list[Loss] = field(default_factory=list)
    quarantined: bool = False  # one of several suspects: they run one at a time, to see which one it is

    def losses_of(self, stage: str | None) -> int:
        """How many replicas of a stage died while they computed this request."""
        return sum(loss.stage == stage and loss.computing for loss in self.losses)

    def hop(self, stage: str) -> Hop | None:
        return next((hop for hop in self.route if hop.stage == stage), None)

    def on(self, event: RequestEvent) -> None:
        """Enter the state that follows."""
        self.state = advance(REQUEST_TRANSITIONS, self.state, event)

    def history(self) -> str:
        return "; ".join(str(loss) for loss in self.losses)

    def status(self, now: float) -> RequestStatus:
        return RequestStatus(
            self.request_id,
            self.state,
            self.attempt,
            tuple(f"{hop.stage}/{hop.replica}" for hop in self.route),
            tuple(self.usage),
            self.deadline - now,
            tuple(str(loss) for loss in self.losses),
        )


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
        self._retained_bytes = 0
        self.replays = 0
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

    def attempt_of(self, request_id: str) -> int:
        """The attempt that runs; 0 for unknown requests."""
        request = self._requests.get(request_id)
        return request.attempt if request is not None else 0

    def requests(self, now: float) -> tuple[RequestStatus, ...]:
        """The oldest requests in flight."""
        return tuple(request.status(now) for request in list(self._requests.values())[:LISTED_REQUESTS])

    @property
    def retained_bytes(self) -> int:
        return self._retained_bytes

    @property
    def voices(self) -> tuple[str, ...]:
        """All voices that the loaded stages know."""
        return tuple(dict.fromkeys(voice for replica in self.replicas for voice in replica.voices))

    @property
    def sample_rate(self) -> int:
        return max((replica.sample_rate for replica in self.replicas), default=0)

    @property
    def max_input_tokens(self) -> int:
        """The longest prompt that every replica of the entry stage takes; 0 while none has said."""
        entry = self.pipeline.entry.name
        limits = [replica.max_input_tokens for replica in self.replicas if replica.stage == entry]
        return min((limit for limit in limits if limit), default=0)

    # -- clients ------------------------------------------------------------------------------------------------------

    def submit(
        self, client: bytes, header: Header, submit: Submit, buffers: Sequence[Frame], now: float
    ) -> list[Instruction]:
        """Admit a request and open it in every stage of its route, or refuse it with one `Failed`."""
        try:
            request = self._admit(client, header, submit, buffers, now)
        except OmniError as error:
            return [ToClient(client, header.request_id, 0, Failed.from_error(error))]
        return self._open(request, now)

    def _admit(
        self, client: bytes, header: Header, submit: Submit, buffers: Sequence[Frame], now: float
    ) -> ActiveRequest:
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
        longest = self.max_input_tokens if submit.prompt.token_ids else 0
        admitted = admit(self.pipeline, submit, self.voices, longest)
        size = _size(submit, buffers)
        for stage in admitted.stages:
            self._check_stage(stage, size)
        request = ActiveRequest(request_id, client, admitted.stages, admitted.modalities, deadline)
        seed = submit.seed if submit.seed is not None else self._new_seed()
        request.retained = Retained(submit, buffers, admitted.params, seed, size)
        self._retained_bytes += size
        self._requests[request_id] = request
        return request

    def _check_stage(self, stage: str, size: int) -> None:
        """Refuse what a stage cannot take, now or in a while."""
        replica = self.replicas.choose(stage)
        if replica is None:
            waits = self.pipeline.stage(stage).on_replica_loss is LossPolicy.REPLAY and self.replicas.may_come(stage)
            if not waits or not self._may_retain(size):
                raise StageUnavailable(f"No replica of stage {stage!r} is ready.", stage=stage)
        elif replica.congested:
            raise Overloaded(
                f"Stage {stage!r} takes no more input for now.", stage=stage, retry_after=RETRY_AFTER_SECONDS
            )

    def _may_retain(self, size: int) -> bool:
        return self._retained_bytes + size <= self.pipeline.coordinator.retain_bytes

    def _open(self, request: ActiveRequest, now: float) -> list[Instruction]:
        """Bind a waiting request to replicas and announce it to them, or let it wait for those that are coming."""
        if request.quarantined and self._quarantine_is_taken():
            return []
        retained = request.retained
        route = []
        for stage in request.stages:
            replica = self.replicas.choose(stage)
            if replica is None or retained is None:
                if retained is not None and self.replicas.may_come(stage):
                    return []
                return self._fail(request, self._unavailable(request, stage), now)
            route.append(replica)
        if retained is None:
            return []
        for replica in route:
            replica.requests.add(request.request_id)
        request.route = tuple(replica.hop for replica in route)
        request.on(RequestEvent.OPENED)
        instructions: list[Instruction] = []
        # Later stages first: their expectation should be there before the first output of the stage before them.
        for hop in reversed(request.route):
            is_entry = hop.stage == self.pipeline.entry.name
            body = Expect(
                route=request.route,
                params=retained.params[hop.stage],
                seed=retained.seed,
                voice=retained.submit.voice,
                priority=retained.submit.priority,
                prompt=retained.submit.prompt if is_entry else None,
            )
            instructions.append(self._to_stage(request, hop, body, retained.buffers if is_entry else ()))
        if not self._wants_retention(request):
            self._let_go(request)
        return instructions

    def _quarantine_is_taken(self) -> bool:
        return any(
            request.quarantined and request.state is RequestState.RUNNING for request in self._requests.values()
        )

    def _wants_retention(self, request: ActiveRequest) -> bool:
        """Whether a running request could run again, and there is room to keep what that takes."""
        policies = {self.pipeline.stage(stage).on_replica_loss for stage in request.stages}
        return LossPolicy.REPLAY in policies and self._may_retain(0)

    def _let_go(self, request: ActiveRequest) -> None:
        if request.retained is not None:
            self._retained_bytes -= request.retained.size
            request.retained = None

    def _unavailable(self, request: ActiveRequest, stage: str) -> StageUnavailable:
        lost = f" It was lost before: {request.history()}." if request.losses else ""
        return StageUnavailable(f"No replica of stage {stage!r} is ready, and none will be.{lost}", stage=stage)

    def reopen(self, now: float) -> list[Instruction]:
        """Run the requests that wait, the oldest first. Call it when a replica became ready."""
        waiting = [request for request in self._requests.values() if request.state is RequestState.WAITING]
        return [instruction for request in waiting for instruction in self._open(request, now)]

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
            return self._stage_failed(request, body.to_error(), now)
        if isinstance(body, StageDone):
            return self._stage_done(request, header.stage, body.usage, now)
        try:
            return self._forward(request, header.stage, body, buffers)
        except StageLost as error:
            return self._fail(request, error, now)

    def reject_from_stage(self, header: Header, error: OmniError, now: float) -> list[Instruction]:
        """A stage's message did not decode: its request ends."""
        request = self._expected_sender(header)
        return self._stage_failed(request, error, now) if request is not None else []

    def _stage_failed(self, request: ActiveRequest, error: OmniError, now: float) -> list[Instruction]:
        """A stage cannot go on with a request; that it cannot reach another one is no fault of the request's."""
        if isinstance(error, StageLost):
            return self._replay_or_fail(request, error, now)
        return self._fail(request, error, now)

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
        if isinstance(body, TextDelta):
            delta = request.delivery.text(body)
            return [self._to_client(request, delta)] if delta is not None else []
        chunk = request.delivery.audio(body, buffers)
        return [self._to_client(request, *chunk)] if chunk is not None else []

    def _stage_done(self, request: ActiveRequest, stage: str, usage: StageUsage, now: float) -> list[Instruction]:
        request.usage[stage] = usage
        if len(request.usage) < len(request.route):
            return []
        if not request.delivery.complete:
            return self._fail(request, diverged(), now)
        request.on(RequestEvent.COMPLETED)
        done = self._to_client(request, Done(usage=request.usage))
        self._close(request, now)
        return [done]

    # -- replicas -----------------------------------------------------------------------------------------------------

    def replica_lost(self, replica: Replica, now: float, why: str, restart: bool = False) -> list[Instruction]:
        """A process is dead: what it held runs again or fails. `restart` says that its replica will be back."""
        replica.on(ReplicaEvent.LOST if restart else ReplicaEvent.GIVEN_UP)
        error = StageLost(f"{replica.name} (epoch {replica.epoch}) died: {why}.", stage=replica.stage)
        held = [self._requests[request_id] for request_id in sorted(replica.requests) if request_id in self._requests]
        replica.requests.clear()
        held = [request for request in held if not self._is_through_with(request, replica.stage)]
        suspects = []
        if not (replica.restart_wanted or replica.blameless):
            for request in held:
                computing = replica.stage not in request.usage
                request.losses.append(Loss(replica.stage, f"{replica.name} (epoch {replica.epoch})", why, computing))
            suspects = [request for request in held if request.losses_of(replica.stage) >= POISON_LOSSES]
        on_trial = [request for request in suspects if request.quarantined]
        guilty = on_trial or (suspects if len(suspects) == 1 else [])
        instructions: list[Instruction] = []
        for request in held:
            if request in guilty:
                instructions += self._fail(request, _poison(request, replica.stage), now)
            else:
                request.quarantined |= request in suspects
                instructions += self._replay_or_fail(request, error, now)
        return instructions + self.reopen(now)

    def _is_through_with(self, request: ActiveRequest, stage: str) -> bool:
        """Whether a request needs nothing of a stage any more: it is done, and so are those that take its output.

        That it is done is not enough: its last chunks may have died with it on their way.
        """
        needed = {stage, *self.pipeline.downstream(stage)} & set(request.stages)
        return needed <= set(request.usage)

    def _replay_or_fail(self, request: ActiveRequest, error: OmniError, now: float) -> list[Instruction]:
        """The request's attempt is lost with `error.stage`."""
        may_replay = (
            request.retained is not None
            and request.attempt + 1 < self.pipeline.coordinator.max_attempts
            and self._policy(error.stage) is LossPolicy.REPLAY
            and all(self.replicas.may_come(stage) for stage in request.stages)
        )
        if not may_replay:
            if request.losses_of(error.stage) >= POISON_LOSSES:
                error = _poison(request, error.stage)
            return self._fail(request, error, now)
        instructions = self._aborts(request)
        self.replicas.release(request.request_id, request.route)
        request.on(RequestEvent.REPLAYED)
        request.route = ()
        request.attempt += 1
        request.next_seq, request.usage = {}, {}
        request.delivery.replay()
        self.replays += 1
        return instructions + self._open(request, now)

    def _policy(self, stage: str | None) -> LossPolicy:
        known = {config.name: config.on_replica_loss for config in self.pipeline.stages}
        return known.get(stage or "", LossPolicy.REPLAY)

    def tick(self, now: float) -> list[Instruction]:
        """Ends requests whose deadline has passed. Call it a few times a second."""
        self._tombstones.expire(now)
        late = [request for request in self._requests.values() if request.deadline <= now]
        instructions = [instruction for request in late for instruction in self._fail(request, _too_late(request), now)]
        if any(request.quarantined for request in self._requests.values()):
            instructions += self.reopen(now)  # the one before may have ended
        return instructions

    def refuse_new(self) -> None:
        """Admit no request any more; those in flight go on."""
        self._closing = True

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
        request.on(RequestEvent.FAILED)
        instructions: list[Instruction] = [self._to_client(request, Failed.from_error(error))]
        instructions += self._aborts(request)
        self._close(request, now)
        return instructions

    def _aborts(self, request: ActiveRequest) -> list[Instruction]:
        """To every replica of the route that lives."""
        instructions: list[Instruction] = []
        for hop in request.route:
            replica = self.replicas.find(hop.stage, hop.replica, hop.epoch)
            if replica is not None and replica.alive:
                instructions.append(self._to_stage(request, hop, Abort()))
        return instructions

    def _close(self, request: ActiveRequest, now: float) -> None:
        del self._requests[request.request_id]
        self._let_go(request)
        self.replicas.release(request.request_id, request.route)
        self._tombstones.add(request.request_id, now)

    def _to_client(self, request: ActiveRequest, body: Body, buffers: Sequence[Frame] = ()) -> ToClient:
        seq = request.client_seq
        request.client_seq += 1
        return ToClient(request.client, request.request_id, seq, body, buffers)

    @staticmethod
    def _to_stage(request: ActiveRequest, hop: Hop, body: Body, buffers: Sequence[Frame] = ()) -> ToStage:
        return ToStage(hop, request.request_id, request.attempt, request.deadline, body, buffers)


def _poison(request: ActiveRequest, stage: str | None) -> Poison:
    text = f"{request.losses_of(stage)} replicas died while they computed this request: {request.history()}."
    return Poison(text, stage=stage)


def _size(submit: Submit, buffers: Sequence[Frame]) -> int:
    """Bytes of a request's prompt and media, roughly."""
    texts = sum(len(part.text or "") for message in submit.prompt.messages for part in message.content)
    return texts + len(submit.prompt.token_ids) + sum(memoryview(buffer).nbytes for buffer in buffers)


def _too_late(request: ActiveRequest) -> DeadlineExceeded:
    lost = f" It was lost before: {request.history()}." if request.losses else ""
    return DeadlineExceeded(f"The request's deadline has passed.{lost}")


def _shutting_down() -> StageUnavailable:
    return StageUnavailable("The pipeline is shutting down.", hint="Send the request to another pipeline.")
