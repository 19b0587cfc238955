"""The life of a request: events in, instructions out. No socket, no clock, no event loop.

A request is active from its admission to its one terminal message (`Done` or `Failed`); after that a tombstone absorbs
late messages about it. When a replica of its route is lost, its stage and those after it run again, with the next
attempt number and the same seed; the stages before send them their input again (`core/routing.py`). The client
does not get anything twice (`protocol/delivery.py`).

When there was a coordinator before this one, clients submit their requests again, and those that stages still hold go
on (`RequestMachine.claim`).
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.admission import Gate
from omni_actors.coordinator.core.instructions import Instruction, Observer, ToClient, ToStage
from omni_actors.coordinator.core.replicas import Evidence, Replica, ReplicaTable, RequestState
from omni_actors.coordinator.core.request import ActiveRequest
from omni_actors.coordinator.core.routing import Planner
from omni_actors.coordinator.core.suspects import poison
from omni_actors.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    OmniError,
    ProtocolError,
    StageLost,
    StageUnavailable,
)
from omni_actors.protocol.codec import BufferList, Frame
from omni_actors.protocol.delivery import diverged
from omni_actors.protocol.fields import ATTEMPTS, Body, Header, ReplicaId
from omni_actors.protocol.messages import (
    MAX_ENDED,
    Abort,
    Done,
    Ended,
    Failed,
    HeldRequest,
    MoreText,
    OpenRequest,
    Output,
    RequestStatus,
    Resend,
    StageDone,
    StageUsage,
    StepsDone,
    Submit,
    Unreachable,
)
from omni_actors.protocol.payloads import NO_INFORMATION
from omni_actors.sharing import Budget, Tombstones

LISTED_REQUESTS = 1000
CLAIM_SECONDS = 10.0  # after which a client has noticed that there is another coordinator
Result = Output | StageDone | Failed | Unreachable


class RequestMachine:
    """Owns the requests, and the table of replicas that they run on.

    Args:
        observer: is called for every change of a request.
        generation: how many coordinators there were before. Stages ignore attempts whose numbers they have had.
    """

    def __init__(self, pipeline: PipelineConfig, observer: Observer | None = None, generation: int = 0) -> None:
        self._observer = observer or Observer()
        self.pipeline = pipeline
        self.replicas = ReplicaTable()
        self.dropped: collections.Counter[str] = collections.Counter()
        self.active: dict[str, ActiveRequest] = {}  # in order of admission
        self._entry = pipeline.entry.name
        self._outputs = {stage.name: frozenset(stage.outputs) for stage in pipeline.stages}
        self.planner = Planner(pipeline, self.replicas)
        self._isolation_runs = self.planner.isolation_runs
        self._ended: dict[ReplicaId, list[str]] = {}  # what stages may forget, to be sent on the next tick
        self.retained = Budget(pipeline.coordinator.retain_bytes)  # what clients sent, by request
        self.replays = 0
        self._closing = False
        self._tombstones = Tombstones(pipeline.coordinator.tombstone_ttl)
        self._first_attempt, self._first_seq = generation * ATTEMPTS, generation << 32
        self._held: dict[str, dict[str, tuple[ReplicaId, HeldRequest]]] = {}  # by request and stage, until claimed
        self._held_until = math.inf
        self.gate = Gate(pipeline, self.replicas, self.planner, self.retained, self._first_attempt)
        self._slots = self.gate.slots

    @property
    def in_flight(self) -> int:
        """Requests that have a slot."""
        return self._slots.held

    @property
    def queued(self) -> int:
        """Requests that wait for a slot."""
        return self._slots.waiting

    def requests_of(self, client: bytes) -> tuple[str, ...]:
        """The ids of a client's requests in flight."""
        return tuple(request.request_id for request in self.active.values() if request.client == client)

    def attempt_of(self, request_id: str, stage: str) -> int:
        """The attempt that a stage works on; 0 for unknown requests."""
        request = self.active.get(request_id)
        return request.attempts.get(stage, 0) if request is not None else 0

    def statuses(self, now: float) -> tuple[RequestStatus, ...]:
        """The oldest requests in flight."""
        return tuple(request.status(now) for request in itertools.islice(self.active.values(), LISTED_REQUESTS))

    # -- clients ------------------------------------------------------------------------------------------------------

    def submit(
        self, client: bytes, header: Header, submit: Submit, buffers: Sequence[Frame], now: float, key: bytes = b""
    ) -> list[Instruction]:
        """Admit a request, or refuse it with one `Failed`. With a slot it is opened in every stage of its route.

        `key` is that of the client's connection, b"" for none.
        """
        try:
            self._check_new(header.request_id)
            request = self.gate.admit(client, header, submit, buffers, now)
            crowded_out = self.gate.enter(request, submit.tenant, key)
        except OmniError as error:
            self._observer.refused(error)
            return [ToClient(client, header.request_id, 0, Failed.from_error(error))]
        self._observer.admitted(header, submit)
        self.active[request.request_id] = request
        instructions: list[Instruction] = []
        for other in crowded_out:
            instructions += self._fail(self.active[other], self.gate.overloaded(), now)
        return self._filled(instructions, now)

    def _filled(self, instructions: list[Instruction], now: float) -> list[Instruction]:
        """What an event leads to, and then the requests that can have a slot after it."""
        while (ticket := self._slots.next()) is not None:
            request = self.active[ticket.request_id]
            request.ticket = ticket
            request.on("granted")
            self.retained.take(ticket.request_id, ticket.size)
            instructions += self.claim(request, now)
            instructions += self._open(request, now)
        return instructions

    def _check_new(self, request_id: str) -> None:
        if self._closing:
            raise _shutting_down()
        if not request_id:
            raise InvalidRequest("The request has no id.")
        if not request_id.isprintable():  # it stands in logs, where a line break would begin a line of its own
            raise InvalidRequest(f"The request id {request_id!r} has characters that cannot be printed.")
        if request_id in self.active or request_id in self._tombstones:
            raise InvalidRequest(f"The request id {request_id!r} was used before.", hint="Use a new id per request.")

    def _open(self, request: ActiveRequest, now: float) -> list[Instruction]:
        """Bind the stages that have no replica and announce the request to them, or let it wait for one."""
        try:
            chosen = self.planner.plan(request, now)
        except OmniError as error:
            return self._fail(request, error, now)
        if chosen is None:
            return []
        opened = request.missing
        for replica in chosen:
            self._bind(request, replica, request.attempt, now)
        request.on("opened")
        if opened:
            self._observer.bound(request.request_id, request.attempt, request.route, opened)
        # Later stages first: each should know the request before the first output of the stage before it.
        instructions: list[Instruction] = [self._open_stage(request, stage) for stage in reversed(opened)]
        instructions += self._resends(request, opened)
        if not self._wants_retention(request):
            self._release_input(request)
        return instructions

    def _bind(self, request: ActiveRequest, replica: Replica, attempt: int, now: float) -> None:
        self.planner.router.hold(request, replica)
        request.bound[replica.stage] = replica.replica_id
        request.attempts[replica.stage] = attempt
        request.opened_at[replica.stage] = now

    def _open_stage(self, request: ActiveRequest, stage: str) -> ToStage:
        """Announce a request to a stage. The entry stage gets the prompt, each stage the information that it wants."""
        retained, prompt, information = request.retained, None, NO_INFORMATION
        buffers = BufferList()
        if retained is not None and stage == self._entry:
            prompt = retained.prompt
            buffers.buffers += retained.prompt_buffers
        replica = self.replicas.at(request.bound[stage])
        if retained is not None and replica is not None:
            information = retained.select_information(replica.facts.wants_information, buffers)
        body = OpenRequest(
            route=request.route,
            params=request.params[stage],
            seed=request.seed,
            voice=request.voice,
            priority=request.priority,
            prompt=prompt,
            information=information,
            more_text=request.more_text if prompt is not None else None,
        )
        return self._to_stage(request, stage, body, buffers.buffers)

    def _resends(self, request: ActiveRequest, opened: Sequence[str]) -> list[Instruction]:
        """Ask the stages that went on to send those that start again their input."""
        return [
            self._to_stage(request, source, Resend(receiver=request.bound[stage], attempt=request.attempts[stage]))
            for stage in opened
            for source in self.planner.graph.sources[stage]
            if source not in opened
        ]

    # -- what a coordinator before this one had -----------------------------------------------------------------------

    def replica_holds(self, replica: Replica, held: Iterable[HeldRequest]) -> None:
        """A replica has these requests of the coordinator before. Their clients will submit them again."""
        for one in held:
            self._held.setdefault(one.request_id, {})[replica.stage] = replica.replica_id, one

    def serve_clients(self, now: float) -> None:
        """From now on clients claim what stages hold."""
        self._held_until = now + CLAIM_SECONDS

    def claim(self, request: ActiveRequest, now: float) -> list[Instruction]:
        """Bind a request to the replicas that go on with it, and ask them for all results; abort it in the others.

        A stage can go on whose sources do, and send what they make to this very attempt. The others run again.
        """
        held = self._held.pop(request.request_id, {})
        delivered = request.delivery.state()
        if not (held or delivered.counts):
            return []
        found = {
            stage: (replica, one)
            for stage, (replica_id, one) in held.items()
            if (replica := self.replicas.at(replica_id)) is not None and replica.alive
        }
        mine = {stage: one for stage, (_, one) in found.items() if stage in request.stages and one.seed == request.seed}

        def is_fed(stage: str) -> bool:
            link = (found[stage][0].replica_id, mine[stage].attempt)
            return all(link in mine[source].receivers for source in self.planner.graph.sources[stage] if source in mine)

        lost = [stage for stage in request.stages if stage not in mine or not is_fed(stage)]
        again = self.planner.graph.again(request.stages, lost, lambda stage: stage in mine)
        request.delivery.replay({modality for stage in again for modality in self._outputs[stage]})
        instructions: list[Instruction] = []
        for stage, (replica, one) in found.items():
            if stage in mine and stage not in again:
                self._bind(request, replica, one.attempt, now)
                self._observer.bound(request.request_id, one.attempt, request.route, (stage,))
                instructions.append(
                    self._to_stage(request, stage, Resend(delivered=delivered, first_seq=self._first_seq))
                )
                if stage == self._entry and request.more_text is not None and request.retained is not None:
                    whole = request.retained.prompt.only_text or ""  # the stage may not have all of it
                    instructions.append(self._to_stage(request, stage, MoreText(whole, final=not request.more_text)))
            else:
                instructions.append(_abort_held(replica.replica_id, one))
        return instructions

    def _abort_unclaimed(self, now: float) -> list[Instruction]:
        """End what no client has claimed in time: it has ended itself, or does not want it any more."""
        if now < self._held_until:
            return []
        unclaimed = [request_id for request_id in self._held if request_id not in self.active]  # others wait for a slot
        return [
            _abort_held(replica_id, one)
            for request_id in unclaimed
            for replica_id, one in self._held.pop(request_id).values()
            if self.replicas.at(replica_id) is not None
        ]

    def _wants_retention(self, request: ActiveRequest) -> bool:
        """Whether a running request could run again, and there is room to keep what that takes."""
        if request.retained is None or not self.retained.fits():
            return False
        return any(self.planner.replays(stage) for stage in request.stages)

    def _release_input(self, request: ActiveRequest) -> None:
        self.retained.release(request.request_id)
        request.retained = None

    def reopen(self, now: float) -> list[Instruction]:
        """A replica has become ready."""
        return self._filled(self._reopen(now), now)

    def _reopen(self, now: float) -> list[Instruction]:
        """Run the requests that wait: suspects, then in order of priority."""
        self._isolation_runs.ended = False
        waiting = [request for request in self.active.values() if request.state is RequestState.WAITING]
        waiting.sort(key=lambda request: (self._isolation_runs.rank(request), request.priority))
        return [instruction for request in waiting for instruction in self._open(request, now)]

    def abort(self, client: bytes, request_id: str, now: float) -> list[Instruction]:
        """A client ends its own request. Idempotent; requests of others are not touched."""
        request = self.active.get(request_id)
        if request is None or request.client != client:
            self.dropped["abort_of_unknown_request"] += 1
            return []
        return self._filled(self._fail(request, Aborted("The client aborted the request."), now), now)

    def more_text(self, client: bytes, request_id: str, more: MoreText, now: float) -> list[Instruction]:
        """The text of a request goes on: keep it with the rest, and pass it on to its stage if that has the rest."""
        request = self.active.get(request_id)
        if request is None or request.client != client:
            self.dropped["text_of_unknown_request"] += 1
            return []
        if not request.more_text or more.start != request.text_length:
            error = ProtocolError(f"Text from character {more.start} came where {request.text_length} have come.")
            return self._filled(self._fail(request, error, now), now)
        request.text_length += len(more.text)
        request.more_text = not more.final
        if request.retained is not None:
            request.retained = request.retained.with_text(more.text)
            if request.ticket is not None:
                self.retained.take(request_id, len(more.text))
        return [self._to_stage(request, self._entry, more)] if self._entry in request.bound else []

    def reject(self, client: bytes, header: Header, error: OmniError, now: float) -> list[Instruction]:
        """A client's message did not decode: answer it, and end the request if it exists."""
        request = self.active.get(header.request_id)
        if request is not None and request.client == client:
            return self._filled(self._fail(request, error, now), now)
        self._observer.refused(error)
        return [ToClient(client, header.request_id, 0, Failed.from_error(error))]

    def end_client(self, client: bytes, error: OmniError, now: float) -> list[Instruction]:
        """End the requests of a client that reads too slowly or may not go on, each with an answer."""
        own = [self.active[request_id] for request_id in self.requests_of(client)]
        return self._filled(self._fail_all(own, error, now), now)

    def client_gone(self, client: bytes, now: float) -> list[Instruction]:
        """End the requests of a client that can no longer be reached."""
        ended = self.end_client(client, Aborted("The client is gone."), now)
        return [one for one in ended if not (isinstance(one, ToClient) and one.client == client)]

    # -- stages -------------------------------------------------------------------------------------------------------

    def from_stage(self, header: Header, body: Result, buffers: Sequence[Frame], now: float) -> list[Instruction]:
        """A result of a stage: forward it, note it, or drop it if it is late or foreign."""
        request = self._expected_sender(header)
        if request is None:
            return []
        first = self._first_seq if header.attempt < self._first_attempt else 0  # an attempt that was claimed
        if header.seq < first and not isinstance(body, Failed):
            self.dropped["late"] += 1  # it was on its way to the coordinator before
            return []
        expected = request.next_seq.get(header.stage, first)
        # A failure may be about the very message that is missing.
        if header.seq != expected and not isinstance(body, Failed):
            error = ProtocolError(
                f"Stage {header.stage!r} sent message {header.seq} where {expected} was due.", stage=header.stage
            )
            return self._filled(self._fail(request, error, now), now)
        request.next_seq[header.stage] = expected + 1
        return self._filled(self._take(request, header, body, buffers, now), now)

    def _take(
        self, request: ActiveRequest, header: Header, body: Result, buffers: Sequence[Frame], now: float
    ) -> list[Instruction]:
        if isinstance(body, Failed):
            return self._stage_failed(request, header.stage, body.to_error(), now)
        if isinstance(body, StageDone):
            self._observer.stage_done(header, body)
            return self._stage_done(request, header.stage, body.usage, now)
        if isinstance(body, Unreachable):
            return self._unreachable(request, body, now)
        self._observer.came(header, body)
        if isinstance(body, StepsDone):
            body = msgspec.structs.replace(body, stage=header.stage)
        try:
            return self._forward(request, header.stage, body, buffers)
        except StageLost as error:
            return self._fail(request, error, now)

    def reject_from_stage(self, header: Header, error: OmniError, now: float) -> list[Instruction]:
        """A stage's message did not decode: its request ends."""
        request = self._expected_sender(header)
        return self._filled(self._stage_failed(request, header.stage, error, now), now) if request is not None else []

    def _stage_failed(self, request: ActiveRequest, stage: str, error: OmniError, now: float) -> list[Instruction]:
        """A stage cannot go on with a request. If that is because something was lost, the request may run again."""
        if not isinstance(error, StageLost):
            return self._fail(request, error, now)
        # A stage that went on when a later one started again, and cannot send it its input, belongs to that loss.
        follows = request.attempts[stage] < request.attempt
        return self._replay_or_fail(request, stage, error, now, counts=not follows)

    def _unreachable(self, request: ActiveRequest, body: Unreachable, now: float) -> list[Instruction]:
        """A stage cannot reach the one after it, and keeps its output for the next process of that stage."""
        stage = body.receiver.stage
        if request.bound.get(stage) != body.receiver or request.attempts[stage] != body.attempt:
            return []  # known, and made up for
        error = StageLost(f"{stage}/{body.receiver.replica} takes no messages.", stage=stage)
        return self._replay_or_fail(request, stage, error, now)

    def _expected_sender(self, header: Header) -> ActiveRequest | None:
        request = self.active.get(header.request_id)
        if request is None:
            self.dropped["late" if header.request_id in self._tombstones else "unknown_request"] += 1
            return None
        if header.sender is None or request.bound.get(header.stage) != header.sender:
            self.dropped["foreign_epoch"] += 1
            return None
        if header.attempt != request.attempts[header.stage]:
            self.dropped["foreign_attempt"] += 1
            return None
        return request

    def _forward(self, request: ActiveRequest, stage: str, body: Output, buffers: Sequence[Frame]) -> list[Instruction]:
        if body.modality and not (body.modality in request.modalities and body.modality in self._outputs[stage]):
            return []
        fresh = request.delivery.take(body, buffers)
        if fresh is None:
            return []
        self._observer.delivered(request.request_id, fresh[0])
        return [self._to_client(request, *fresh)]

    def _stage_done(self, request: ActiveRequest, stage: str, usage: StageUsage, now: float) -> list[Instruction]:
        request.usage[stage] = usage
        replica = self.replicas.at(request.bound[stage])
        if replica is not None:
            replica.finished(request.request_id)
        if request.suspected_by == stage:
            self._isolation_runs.clear(request)
        if len(request.usage) < len(request.stages):
            return []
        if not request.delivery.complete:
            return self._fail(request, diverged(), now)
        request.on("completed")
        self._observer.ended(request.request_id, None)
        done = self._to_client(request, Done(usage=request.usage))
        for replica_id in request.bound.values():
            self._ended.setdefault(replica_id, []).append(request.request_id)
        self._close(request, now)
        return [done]

    # -- replicas -----------------------------------------------------------------------------------------------------

    def replica_lost(
        self, replica: Replica, now: float, why: str, evidence: Evidence = Evidence.CRASHED
    ) -> list[Instruction]:
        """Run again or fail what a lost replica held. `evidence`: what the loss says against its requests."""
        error = StageLost(f"{replica.name} (epoch {replica.epoch}) died: {why}.", stage=replica.stage)
        held = [self.active[request_id] for request_id in sorted(replica.requests) if request_id in self.active]
        replica.release_all()
        self._ended.pop(replica.replica_id, None)
        held = [request for request in held if not self.planner.is_through_with(request, replica.stage)]
        culprit = self._isolation_runs.record_crash(held, replica, why, evidence, self.planner.may_have_begun, now)
        instructions: list[Instruction] = []
        if culprit is not None:
            instructions += self._fail(culprit, poison(culprit, replica.stage), now)
            self._isolation_runs.clear_others(culprit, self.active.values())
        for request in held:
            if request is not culprit:
                instructions += self._replay_or_fail(request, replica.stage, error, now)
        return self._filled(instructions + self._reopen(now), now)

    def note_congestion(self, replica_id: ReplicaId, congested: bool, now: float) -> list[Instruction]:
        """A replica has granted no credit for more input, or some again: new requests for it wait meanwhile."""
        replica = self.replicas.at(replica_id)
        if replica is None or replica.congested == congested:
            return []
        replica.congested = congested
        self._slots.look_again()
        return self._filled([], now)

    def _replay_or_fail(
        self, request: ActiveRequest, lost: str, error: OmniError, now: float, counts: bool = True
    ) -> list[Instruction]:
        """Run the stage `lost` again, whose work on a request is gone, with those that depend on it."""
        again = self.planner.replay(request, lost, counts)
        if again is None:
            return self._fail(request, error, now)
        bound = [stage for stage in request.bound if stage in again]
        instructions = self._aborts(request, bound)
        self._unbind(request, bound)
        for stage in bound:
            request.next_seq.pop(stage, None)
            request.usage.pop(stage, None)
        request.delivery.replay({modality for stage in again for modality in self._outputs[stage]})
        request.losses_made_up += counts
        self.replays += counts
        self._observer.replayed(request.request_id, error, counts)
        if request.state is RequestState.RUNNING:  # otherwise no stage has seen the number yet
            request.on("replayed")
            request.attempt += 1
        return instructions + self._open(request, now)

    def tick(self, now: float) -> list[Instruction]:
        """End requests whose deadline has passed. Call it a few times a second."""
        self._tombstones.expire(now)
        self._slots.look_again()
        instructions = self._abort_unclaimed(now)
        for request in list(self.active.values()):
            if request.deadline <= now:
                instructions += self._fail(
                    request, DeadlineExceeded(f"The request's deadline has passed.{request.lost_before()}"), now
                )
        self._isolation_runs.tick(now)
        if self._isolation_runs.ended or self._isolation_runs:  # a replica is free again, or may be empty for suspects
            instructions += self._reopen(now)
        return self._filled(instructions + self._tell_ended(), now)

    def _tell_ended(self) -> list[Instruction]:
        """Let stages forget what they kept of requests that are done."""
        instructions: list[Instruction] = []
        for replica_id, request_ids in self._ended.items():
            replica = self.replicas.at(replica_id)
            if replica is None or not replica.alive:
                continue
            for begin in range(0, len(request_ids), MAX_ENDED):
                body = Ended(request_ids=tuple(request_ids[begin : begin + MAX_ENDED]))
                instructions.append(ToStage(replica_id, "", 0, 0.0, body))
        self._ended.clear()
        return instructions

    def refuse_new(self) -> None:
        """Admit no more requests; those in flight go on."""
        self._closing = True

    def shut_down(self, now: float) -> list[Instruction]:
        """End every request with an answer to its client, and admit no more."""
        self._closing = True
        return self._fail_all(list(self.active.values()), _shutting_down(), now)

    # -- ends and messages --------------------------------------------------------------------------------------------

    def _fail(self, request: ActiveRequest, error: OmniError, now: float) -> list[Instruction]:
        """End a request with an error, the only way there is: one message to the client, one to each of its stages."""
        request.on("failed")
        self._observer.ended(request.request_id, error)
        instructions: list[Instruction] = [self._to_client(request, Failed.from_error(error))]
        instructions += self._aborts(request, request.bound)
        self._close(request, now)
        return instructions

    def _fail_all(self, requests: Sequence[ActiveRequest], error: OmniError, now: float) -> list[Instruction]:
        return [instruction for request in requests for instruction in self._fail(request, error, now)]

    def _aborts(self, request: ActiveRequest, stages: Iterable[str]) -> list[Instruction]:
        """Abort a request in those of its replicas that are alive."""
        return [self._to_stage(request, stage, Abort()) for stage in stages if self.planner.holds(request, stage)]

    def _unbind(self, request: ActiveRequest, stages: Iterable[str]) -> None:
        for stage in list(stages):
            replica_id = request.bound.pop(stage)
            del request.attempts[stage], request.opened_at[stage]
            replica = self.replicas.at(replica_id)
            if replica is not None:
                replica.release(request.request_id)

    def _close(self, request: ActiveRequest, now: float) -> None:
        del self.active[request.request_id]
        if self._slots.leave(request.request_id):  # else no stage has heard of it
            self._release_input(request)
            self._unbind(request, request.bound)
            self._isolation_runs.clear(request)
            self._tombstones.add(request.request_id, now)

    def _to_client(self, request: ActiveRequest, body: Body, buffers: Sequence[Frame] = ()) -> ToClient:
        seq = request.client_seq
        request.client_seq += 1
        return ToClient(request.client, request.request_id, seq, body, buffers)

    @staticmethod
    def _to_stage(request: ActiveRequest, stage: str, body: Body, buffers: Sequence[Frame] = ()) -> ToStage:
        replica_id, attempt = request.bound[stage], request.attempts[stage]
        return ToStage(replica_id, request.request_id, attempt, request.deadline, body, buffers)


def _abort_held(replica_id: ReplicaId, held: HeldRequest) -> ToStage:
    return ToStage(replica_id, held.request_id, held.attempt, 0.0, Abort())


def _shutting_down() -> StageUnavailable:
    return StageUnavailable("The pipeline is shutting down.", hint="Send the request to another pipeline.")
