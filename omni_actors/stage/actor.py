"""The actor: drives one engine by messages. Knows requests, order and deadlines; knows no socket and no model.

Every method that takes an event returns the messages to send. A request is here from its `OpenRequest` (chunks that
come earlier wait in `early_chunks`) until the engine finishes it, it fails, or it is aborted; a tombstone absorbs later
messages. A request may come again with the next attempt number; to the engine that is another request, with its own id.
Output for later stages is kept until the coordinator says that the request has ended, in case one of them has to start
again (`resend_buffer.py`).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from omni_actors.config import Modality, PipelineConfig, StageConfig
from omni_actors.errors import DeadlineExceeded, EngineError, OmniError, Overloaded, ProtocolError, StageLost
from omni_actors.logs import get_logger
from omni_actors.protocol.codec import Envelope, Frame
from omni_actors.protocol.common import Abort, Credit, Failed
from omni_actors.protocol.header import Body, Header, ReplicaId
from omni_actors.protocol.results import FinishReason, StageDone, StageUsage, Unreachable
from omni_actors.protocol.stage import SAMPLE_RATE, SAMPLES, Chunk, Ended, IntoStage, OpenRequest, Resend
from omni_actors.protocol.tombstones import Tombstones
from omni_actors.stage.early_chunks import EarlyChunks
from omni_actors.stage.engine_interface import (
    AudioEvent,
    EngineEvent,
    ErrorEvent,
    FinishedEvent,
    StageEngine,
    StageInputs,
    StageRequest,
    StreamEvent,
    TextEvent,
)
from omni_actors.stage.meter import StageMeter, Track
from omni_actors.stage.outgoing import Outgoing, chunk_of, result_of
from omni_actors.stage.processors import Action, Extend, Piece, Skip, Start, StreamProcessor
from omni_actors.stage.resend_buffer import Budget, Edge, Output

logger = get_logger(__name__)

CLOCK_SECONDS = 5.0  # by which the clocks of two hosts may differ
RESENT_MESSAGES = 64  # per step
FORGET_SECONDS = 10.0  # after its deadline a request is over, whoever fails to say so


@dataclass
class Work:
    """One attempt at a request in this stage. `request` is what the engine knows, under an id of its own."""

    request_id: str
    request: StageRequest
    route: tuple[ReplicaId, ...]
    attempt: int
    deadline: float
    opened: float
    processor: StreamProcessor | None
    track: Track
    output: Output | None  # what later stages got; `None` if the route has none
    started: bool = False  # the engine has it
    first_output: float = 0.0
    samples: int = 0  # sound that went to later stages
    output_ended: bool = False  # later stages have had their final chunk
    next_seq: dict[str, int] = field(default_factory=dict)  # by source stage
    ended_sources: set[str] = field(default_factory=set)  # those whose final chunk has come
    results: int = 0  # sent to the coordinator


class StageActor:
    """Drives `engine` for one replica.

    Args:
        identity: stage, replica and epoch of this process.
        processor_class: makes the input processor of a request; `None` for the entry stage.
        clock: Unix time in seconds.
        meter: counts and takes times; without one nothing is measured.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        stage: StageConfig,
        identity: ReplicaId,
        engine: StageEngine,
        processor_class: type[StreamProcessor] | None,
        clock: Callable[[], float],
        meter: StageMeter | None = None,
    ) -> None:
        self._meter = meter or StageMeter(identity.stage, identity.replica, identity.epoch)
        self._stage = stage
        self._downstream = pipeline.downstream(stage.name)
        self._says_text = Modality.TEXT in stage.outputs
        self._identity = identity
        self._engine = engine
        self._processor_class = processor_class
        self._clock = clock
        self._work: dict[str, Work] = {}
        self._finished: dict[str, Work] = {}  # here, but not yet everywhere: their output is kept
        self._budget = Budget(stage.retain_bytes)
        self._resending: collections.deque[tuple[Work, Edge]] = collections.deque()
        self._runs = 0
        self._by_engine_id: dict[str, Work] = {}
        self._whole: set[str] = set()  # requests whose input is all here
        self._backlog_requests = pipeline.flow.backlog_requests
        self._most_requests = 2 * pipeline.coordinator.max_in_flight  # what has just ended may overlap with what begins
        self._max_timeout = pipeline.coordinator.max_timeout
        self._default_timeout = pipeline.coordinator.default_timeout
        self._parking = EarlyChunks(pipeline.flow.early_chunk_seconds)
        self._tombstones = Tombstones(pipeline.coordinator.tombstone_ttl)
        self.dropped: collections.Counter[str] = collections.Counter()

    # -- events -------------------------------------------------------------------------------------------------------

    def receive(self, envelope: Envelope[IntoStage]) -> list[Outgoing]:
        """A checked message from the coordinator or a source stage."""
        body = envelope.body
        if isinstance(body, OpenRequest | Abort | Resend | Ended) and envelope.header.stage:
            self.dropped["not_the_coordinator"] += 1
            return []
        if isinstance(body, OpenRequest):
            return self._open(envelope.header, body, envelope)
        if isinstance(body, Abort):
            self._abort(envelope.header)
            return []
        if isinstance(body, Resend):
            return self._resend(envelope.header, body)
        if isinstance(body, Ended):
            for request_id in body.request_ids:
                self._release_request(request_id)
            return []
        if isinstance(body, Credit):  # belongs to the sockets' threads
            self.dropped["credit"] += 1
            return []
        return self._chunk(envelope.header, body, envelope)

    def reject(self, header: Header, error: OmniError) -> list[Outgoing]:
        """A message about a request did not decode or could not be sent: the request fails, whoever sent it."""
        work = self._work.get(header.request_id)
        if work is not None and header.stage and header.attempt < work.attempt:
            self.dropped["late"] += 1
            return []
        if work is not None or header.request_id in self._tombstones or not header.request_id:
            return self._fail(header.request_id, error)
        return self._refuse(header, error)  # unannounced: somebody still has to hear of it

    def undelivered(self, request_id: str, receiver: ReplicaId, error: OmniError) -> list[Outgoing]:
        """A later stage takes no messages: what is made for it is kept until its next life asks for it."""
        work = self._sender(request_id)
        edge = work.output.edges.get(receiver.stage) if work is not None and work.output is not None else None
        if work is None or work.output is None or edge is None or edge.replica_id != receiver or edge.lost:
            self.dropped["undelivered_of_ended_request"] += 1
            return []
        if not work.output.whole:
            return self._fail(request_id, error)
        edge.lost, edge.again = True, None
        return [self._result(work, Unreachable(receiver=receiver, attempt=edge.attempt))]

    def step(self) -> list[Outgoing]:
        """Some of what is to be sent again, then one step of the engine, its events as messages."""
        messages = self._send_again()
        if self._engine.runnable():
            for event in self._step_engine():
                messages += self._on_event(event)
        return messages

    def _step_engine(self) -> Sequence[EngineEvent]:
        """One step, and what it says of when requests began."""
        began = self._meter.clock()
        events = self._engine.step()
        scheduled = self._engine.take_scheduled()
        self._meter.stepped(began, took_all=scheduled is None)
        for engine_id, moment in scheduled or ():
            work = self._by_engine_id.get(engine_id)
            if work is not None:
                self._meter.scheduled(work.track, self._meter.clock.of(moment))
        return events

    def tick(self) -> list[Outgoing]:
        """Ends requests past their deadline and forgets what has been parked too long."""
        now = self._clock()
        self._tombstones.expire(now)
        messages = []
        for request_id in [key for key, work in self._work.items() if work.deadline <= now]:
            messages += self._fail(request_id, DeadlineExceeded("The request's deadline has passed."))
        for header in self._parking.overdue(now):
            messages += self._refuse(header, ProtocolError("Input came, but its announcement did not."))
            self.dropped["parked_too_long"] += 1
        over = [key for key, work in self._finished.items() if work.deadline + FORGET_SECONDS <= now]
        for request_id in over:
            self._release_request(request_id)
        return messages

    def runnable(self) -> bool:
        return bool(self._resending) or self._engine.runnable()

    @property
    def saturated(self) -> bool:
        """Whether the engine has so much to compute that more input should wait with its senders.

        Only requests that need no further input count, and only while the engine can work: to hold back input that
        it waits for would be the end of both.
        """
        return len(self._whole) > self._backlog_requests and self._engine.runnable()

    def urgent(self) -> bool:
        """Whether the engine computes the first output of requests, or will when it is their turn."""
        return any(
            work.started and not work.first_output and not self._engine.waits_for_input(work.request_id)
            for work in self._work.values()
        )

    def held(self) -> dict[str, int]:
        """What this stage holds now beside its engine; all zero when it is idle."""
        return {
            "requests": len(self._work),
            **self._parking.counts(),
            "retained": len(self._finished),
            "retained_bytes": self._budget.used,
        }

    def counts(self) -> dict[str, int]:
        """What this stage and its engine hold now; all zero when it is idle."""
        return {
            **self.held(),
            "total_runs": self._runs,
            "dropped_retained": self._budget.overflows,
            **{f"engine_{name}": value for name, value in self._engine.counts().items()},
        }

    # -- inbound ------------------------------------------------------------------------------------------------------

    def _open(self, header: Header, expect: OpenRequest, envelope: Envelope[IntoStage]) -> list[Outgoing]:
        request_id = header.request_id
        if self._identity not in expect.route:
            self.dropped["foreign_epoch"] += 1
            return []
        running = self._work.get(request_id)
        if self._tombstones.covers(request_id, header.attempt) or (
            running is not None and header.attempt <= running.attempt
        ):
            self.dropped["expected_twice"] += 1
            return []
        if running is not None:  # the abort of the attempt before comes later, or not at all
            self._drop(request_id)
        self._release_request(request_id)
        now = self._clock()
        if not header.deadline <= now + self._max_timeout + CLOCK_SECONDS:  # not a number, too
            return self._refuse(header, ProtocolError(f"The deadline {header.deadline} is no point in time."))
        if len(self._work) >= self._most_requests:
            return self._refuse(header, Overloaded(f"{len(self._work)} requests are open here, none more is taken."))
        request = StageRequest(
            request_id=f"{request_id}~{header.attempt}" if header.attempt else request_id,
            params=expect.params,
            seed=expect.seed,
            voice=expect.voice,
            priority=expect.priority,
            streams=any(replica_id.stage in self._downstream for replica_id in expect.route),
        )
        receivers = [replica_id for replica_id in expect.route if replica_id.stage in self._downstream]
        processor = None
        if self._processor_class is not None and self._stage.inputs is not None:
            processor = self._processor_class(self._stage.inputs.start_after, self._stage.source_names)
        work = self._work[request_id] = Work(
            request_id,
            request,
            expect.route,
            header.attempt,
            header.deadline or now + self._default_timeout,
            now,
            processor,
            self._meter.expected(request_id, header.attempt, has_input=expect.prompt is not None),
            Output(self._budget, receivers, header.attempt) if receivers else None,
        )
        self._by_engine_id[request.request_id] = work
        logger.debug("request expected", extra={"request_id": request_id})
        if expect.prompt is not None:
            self._whole.add(request_id)
            media = [envelope.tensor(item.tensor) for item in expect.prompt.media]
            start = Start(StageInputs(prompt=expect.prompt, media=media))
            return self._guarded(work, lambda: [start])
        messages = []
        for parked in self._parking.take(request_id):  # what belongs to an attempt before is dropped there
            messages += self.receive(parked)
        return messages

    def _chunk(self, header: Header, chunk: Chunk, envelope: Envelope[IntoStage]) -> list[Outgoing]:
        work = self._work.get(header.request_id)
        if work is None or header.attempt > work.attempt:
            return self._park(header, envelope)
        if ReplicaId(header.stage, header.replica, header.epoch) not in work.route or header.attempt != work.attempt:
            self.dropped["foreign_epoch"] += 1
            return []
        if header.stage not in self._stage.source_names or work.processor is None:
            self.dropped["unexpected_source"] += 1
            return []
        expected = work.next_seq.get(header.stage, 0)
        if header.seq != expected:
            text = f"Stage {header.stage!r} sent chunk {header.seq} where {expected} was due."
            return self._fail(header.request_id, ProtocolError(text))
        if header.stage in work.ended_sources:
            return self._fail(header.request_id, ProtocolError(f"Stage {header.stage!r} sent more after its end."))
        work.next_seq[header.stage] = expected + 1
        size = len(chunk.token_ids) + sum(memoryview(buffer).nbytes for buffer in envelope.buffers)
        self._meter.received(work.track, f"{header.stage}/{header.replica}", chunk.sent, size)
        if chunk.final:
            work.ended_sources.add(header.stage)
            if len(work.ended_sources) == len(self._stage.source_names):
                self._whole.add(header.request_id)
        processor = work.processor
        return self._guarded(work, lambda: processor.feed(header.stage, Piece.of(chunk, envelope)))

    def _guarded(self, work: Work, decide: Callable[[], Iterable[Action]]) -> list[Outgoing]:
        """Apply actions; an error of the processor's or the engine's is the request's."""
        request_id = work.request_id
        try:
            for action in decide():
                if isinstance(action, Start):
                    self._runs += 1
                    self._engine.start(work.request, action.inputs)
                    work.started = True
                    self._meter.started(work.track)
                elif isinstance(action, Extend):
                    self._engine.extend(
                        work.request.request_id, action.rows, token_ids=action.token_ids, complete=action.complete
                    )
                elif isinstance(action, Skip):
                    return self._finish_empty(work)
        except OmniError as error:
            return self._fail(request_id, error)
        except Exception as error:  # the request's fault as far as anybody can tell; the others go on
            logger.exception("a request's input was refused", extra={"request_id": request_id})
            return self._fail(request_id, EngineError(f"{type(error).__name__}: {error}."))
        return []

    def _park(self, header: Header, envelope: Envelope[IntoStage]) -> list[Outgoing]:
        if self._tombstones.covers(header.request_id, header.attempt):
            self.dropped["late"] += 1
            return []
        if self._parking.put(envelope, self._clock()):
            return []
        self.dropped["parked_overflow"] += 1
        return self._refuse(header, ProtocolError("Too much input came before its announcement."))

    # -- outbound -----------------------------------------------------------------------------------------------------

    def _on_event(self, event: EngineEvent) -> list[Outgoing]:
        work = self._by_engine_id.get(event.request_id)
        if work is None:
            self.dropped["event_of_ended_request"] += 1
            return []
        if isinstance(event, ErrorEvent):
            return self._fail(work.request_id, event.error)
        if isinstance(event, FinishedEvent):
            return self._finish(work, event.reason, event.input_tokens, event.output_tokens)
        if not work.first_output:
            work.first_output = self._clock()
        moment = self._meter.output(work.track)
        self._count(event)
        if isinstance(event, AudioEvent) and Modality.AUDIO not in self._stage.outputs:
            event = self._as_stream(work, event)
        if isinstance(event, StreamEvent):
            return self._stream(work, event, moment)
        return [self._result(work, *result_of(event, moment))]

    def _count(self, event: TextEvent | AudioEvent | StreamEvent) -> None:
        if isinstance(event, AudioEvent):
            self._meter.audio_seconds += event.samples.shape[0] / event.sample_rate
        elif isinstance(event, TextEvent) or not self._says_text:  # else its tokens were counted with the text
            self._meter.output_tokens += len(event.token_ids)

    def _as_stream(self, work: Work, event: AudioEvent) -> StreamEvent:
        """Sound that is not for the client is input of the stages after this one."""
        start = work.samples
        work.samples += event.samples.shape[0]
        tensors, scalars = {SAMPLES: event.samples}, {SAMPLE_RATE: event.sample_rate}
        return StreamEvent(event.request_id, (), tensors, scalars, start)

    def _stream(self, work: Work, event: StreamEvent, moment: float) -> list[Outgoing]:
        """The same chunk to every later stage of the route."""
        work.output_ended = work.output_ended or event.final
        return self._give(work, *chunk_of(event, moment))

    def _give(self, work: Work, chunk: Chunk, buffers: Sequence[Frame]) -> list[Outgoing]:
        """Keep a chunk, and send it to those stages that have all before it."""
        output = work.output
        if output is None:
            return []
        output.keep(chunk, buffers)
        behind = [edge for edge in output.edges.values() if edge.lost or edge.again is not None]
        if behind and not output.whole:
            text = f"{behind[0].replica_id.stage} is not there, and more cannot be kept for it."
            return self._fail(work.request_id, StageLost(text, stage=self._stage.name))
        return [self._to_next(work, edge, chunk, buffers) for edge in output.edges.values() if edge not in behind]

    def _finish_empty(self, work: Work) -> list[Outgoing]:
        """Nothing to compute here."""
        return self._finish(work, FinishReason.STOP, 0, 0)

    def _finish(self, work: Work, reason: FinishReason, input_tokens: int, output_tokens: int) -> list[Outgoing]:
        """The engine is done. Later stages hear of it even if the engine itself gave them no end."""
        last: list[Outgoing] = []
        if work.output is not None and not work.output_ended:
            end = StreamEvent(work.request.request_id, start=work.samples, final=True)
            last = self._stream(work, end, self._meter.output(work.track))
            if work.request_id not in self._work:  # it could not be kept for a stage that is not there
                return last
        now = self._clock()
        usage = StageUsage(
            finish_reason=reason,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            first_output=max(0.0, work.first_output - work.opened) if work.first_output else 0.0,
            finished=max(0.0, now - work.opened),
        )
        timeline = self._meter.done(work.track, input_tokens, output_tokens)
        message = self._result(work, StageDone(usage=usage, timeline=timeline))
        self._forget(work.request_id, work.attempt)
        if work.output is not None:
            work.processor = None
            self._finished[work.request_id] = work
        return [*last, message]

    def _fail(self, request_id: str, error: OmniError) -> list[Outgoing]:
        """Ends a request here and tells the coordinator, which ends it everywhere else."""
        work = self._sender(request_id)
        if work is None:
            self.dropped["error_of_unknown_request"] += 1
            return []
        logger.info("request failed: %s", error.code.value, extra={"request_id": request_id})
        message = self._result(work, Failed.from_error(error, self._stage.name))
        self._meter.failed(work.track, error.code.value)
        if request_id in self._work:
            self._drop(request_id)
        self._release_request(request_id)
        return [message]

    def _refuse(self, header: Header, error: OmniError) -> list[Outgoing]:
        """Fail a request that has not been announced here; should the announcement still come, it is ignored."""
        if header.request_id in self._work:  # an attempt before
            self._drop(header.request_id)
        self._release_request(header.request_id)
        self._forget(header.request_id, header.attempt)
        own = Header(
            kind="",
            request_id=header.request_id,
            stage=self._identity.stage,
            replica=self._identity.replica,
            epoch=self._identity.epoch,
            attempt=header.attempt,
        )
        return [Outgoing(None, own, Failed.from_error(error, self._stage.name))]

    def _result(self, work: Work, body: Body, buffers: Sequence[Frame] = ()) -> Outgoing:
        """A message to the coordinator."""
        seq = work.results
        work.results += 1
        return Outgoing(None, self._header(work, work.attempt, seq), body, buffers)

    def _to_next(self, work: Work, edge: Edge, chunk: Chunk, buffers: Sequence[Frame]) -> Outgoing:
        seq = edge.sent
        edge.sent += 1
        return Outgoing(edge.replica_id, self._header(work, edge.attempt, seq), chunk, buffers)

    def _header(self, work: Work, attempt: int, seq: int) -> Header:
        return Header(
            kind="",
            request_id=work.request_id,
            stage=self._identity.stage,
            replica=self._identity.replica,
            epoch=self._identity.epoch,
            attempt=attempt,
            seq=seq,
            deadline=work.deadline,
        )

    # -- again --------------------------------------------------------------------------------------------------------

    def _sender(self, request_id: str) -> Work | None:
        """The work on a request, also when it is finished here."""
        return self._work.get(request_id) or self._finished.get(request_id)

    def _resend(self, header: Header, body: Resend) -> list[Outgoing]:
        """A later stage begins anew: it gets all that was sent before, a few messages a step, and then what is made."""
        work = self._sender(header.request_id)
        stage = body.receiver.stage
        if work is not None and work.attempt > header.attempt:
            self.dropped["late"] += 1
            return []
        if work is None or work.attempt != header.attempt:
            return self._refuse(header, StageLost(f"Nothing is known of the request that {stage} needs again."))
        output = work.output
        if output is None or stage not in output.edges or not output.whole:
            return self._fail(header.request_id, StageLost(f"What {stage} needs again is not kept."))
        output.begin_again(body.receiver, body.attempt)
        self._resending.append((work, output.edges[stage]))
        return []

    def _send_again(self) -> list[Outgoing]:
        messages: list[Outgoing] = []
        while self._resending and len(messages) < RESENT_MESSAGES:
            work, edge = self._resending[0]
            entry = work.output.next_again(edge) if work.output is not None else None
            if entry is not None:
                kept, buffers = entry
                chunk = msgspec.structs.replace(kept, sent=self._meter.clock())  # no output of now, but sent now
                messages.append(self._to_next(work, edge, chunk, buffers))
            if edge.again is None:
                self._resending.popleft()
        return messages

    # -- ends ---------------------------------------------------------------------------------------------------------

    def drop_all(self) -> None:
        """The coordinator is lost, and with it every request: end them in the engine and tell nobody."""
        for request_id in list(self._work):
            self._drop(request_id)
        for request_id in list(self._finished):
            self._release_request(request_id)

    def _abort(self, header: Header) -> None:
        """The attempt is over here, and so are those before; a later one goes on. Idempotent."""
        work = self._work.get(header.request_id)
        if work is not None and work.attempt <= header.attempt:
            self._drop(header.request_id)
        elif work is None:
            finished = self._finished.get(header.request_id)
            if finished is not None and finished.attempt <= header.attempt:
                self._release_request(header.request_id)
            self._forget(header.request_id, header.attempt)

    def _drop(self, request_id: str) -> None:
        """The request is over here, whatever state it is in."""
        work = self._work[request_id]
        self._meter.failed(work.track, "dropped")
        self._engine.abort(work.request.request_id)
        if work.output is not None:
            work.output.release()
        self._forget(request_id, work.attempt)

    def _release_request(self, request_id: str) -> None:
        """What was kept of a request that is finished here is not needed any more. Idempotent."""
        work = self._finished.pop(request_id, None)
        if work is not None and work.output is not None:
            work.output.release()

    def _forget(self, request_id: str, attempt: int) -> None:
        """Attempts up to this one are over; what has come for a later one stays parked."""
        work = self._work.pop(request_id, None)
        if work is not None:
            self._by_engine_id.pop(work.request.request_id, None)
        self._whole.discard(request_id)
        self._tombstones.add(request_id, self._clock(), attempt)
        self._parking.drop(request_id, attempt)
