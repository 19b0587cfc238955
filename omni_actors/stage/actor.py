"""The actor: drives one engine by messages. Knows requests, order and deadlines; knows no socket and no model.

A request that runs again comes with the next attempt number. A stage has at most one attempt at a request at a time.

Every method that takes an event returns the messages to send. An attempt at a request begins with its `OpenRequest`;
chunks that come earlier wait. When it has ended, a tombstone absorbs late messages.
Output is kept until the coordinator says that the request has ended everywhere: a later stage may have to start again,
or another coordinator may ask for all results (`attempts.py`).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from omni_actors.config import PipelineConfig, StageConfig
from omni_actors.config.checks import sends_text
from omni_actors.errors import DeadlineExceeded, EngineError, OmniError, Overloaded, ProtocolError, StageLost, advance
from omni_actors.logs import get_logger, trace_of
from omni_actors.protocol.codec import Envelope, Frame
from omni_actors.protocol.delivery import COUNTED, Delivery
from omni_actors.protocol.fields import Body, Header, ReplicaId
from omni_actors.protocol.messages import (
    MAX_HELD,
    Abort,
    Chunk,
    Credit,
    Ended,
    Failed,
    FinishReason,
    HeldRequest,
    ImageChunk,
    IntoStage,
    MoreText,
    OpenRequest,
    Resend,
    StageDone,
    StageUsage,
    StepsDone,
    Unreachable,
)
from omni_actors.sharing import Budget, Tombstones
from omni_actors.stage.attempts import (
    ATTEMPT_TRANSITIONS,
    CLIENT,
    Attempt,
    AttemptEvent,
    AttemptState,
    EarlyChunks,
    InputOrder,
    Receiver,
    ResendBuffer,
    stage_of,
)
from omni_actors.stage.engine_interface import (
    EngineEvent,
    ErrorEvent,
    FinishedEvent,
    ProgressEvent,
    StageEngine,
    StageRequest,
    StreamEvent,
)
from omni_actors.stage.meter import StageMeter
from omni_actors.stage.outbound import Outgoing, chunk_of, divide, result_of
from omni_actors.stage.processors import (
    Action,
    Extend,
    ExtendText,
    InputPiece,
    Skip,
    Start,
    StreamProcessor,
    Text2Speech,
    start_of,
)
from omni_actors.transport.link import wire_size

logger = get_logger(__name__)


def _is_passing(body: Body) -> bool:
    """Whether a result matters only while the answer is made, so that nobody asks for it later."""
    match body:
        case StepsDone() | ImageChunk(preview=True) | Unreachable() | Failed():
            return True
        case _:
            return False


CLOCK_SECONDS = 5.0  # by which the clocks of two hosts may differ
RESENT_MESSAGES, RESENT_BYTES = 1024, 8 << 20  # per step: more than a stage makes in one
FORGET_SECONDS = 10.0  # after its deadline a request is over, even if its end was never announced


@dataclass(eq=False)
class StageActor:
    """Drives `engine` for one replica.

    Args:
        identity: stage, replica and epoch of this process.
        processor_class: makes the input processor of a request; `None` for the entry stage.
        clock: Unix time in seconds.
        meter: counts and takes times; without one nothing is measured.
    """

    pipeline: PipelineConfig
    stage: StageConfig
    identity: ReplicaId
    engine: StageEngine
    processor_class: type[StreamProcessor] | None
    clock: Callable[[], float]
    meter: StageMeter | None = None

    def __post_init__(self) -> None:
        self._meter = self.meter or StageMeter(self.identity)
        self._downstream = self.pipeline.downstream(self.stage.name)
        self._sends_text = sends_text(self.pipeline, self.stage.name)
        self._attempts: dict[str, Attempt] = {}  # those that have not ended, by request
        self._by_engine_id: dict[str, Attempt] = {}  # the live ones, by the engine's id
        self._in_state: collections.Counter[AttemptState] = collections.Counter()  # asked for with every message
        self._early = EarlyChunks(self.pipeline.flow.early_chunk_seconds)
        self._tombstones = Tombstones(self.pipeline.coordinator.tombstone_ttl)
        self._retained = Budget(self.stage.retain_bytes)
        self._unretained = 0  # attempts too large to retain
        self._resending: collections.deque[tuple[Attempt, ResendBuffer, Receiver]] = collections.deque()
        self._runs = 0
        self._backlog_requests = self.pipeline.flow.backlog_requests
        self._bounds = self.pipeline.coordinator
        self.dropped: collections.Counter[str] = collections.Counter()

    # -- events -------------------------------------------------------------------------------------------------------

    def receive(self, envelope: Envelope[IntoStage]) -> list[Outgoing]:
        """Handle a checked message from the coordinator or a source stage."""
        header = envelope.header
        match envelope.body:
            case OpenRequest() | MoreText() | Abort() | Resend() | Ended() if header.stage:
                self.dropped["not_the_coordinator"] += 1
            case OpenRequest() as request:
                return self._open(header, request, envelope)
            case MoreText() as more:
                return self._take_text(header, more)
            case Chunk() as chunk:
                return self._take_chunk(header, chunk, envelope)
            case Resend() as body:
                return self._resend(header, body)
            case Abort():
                self._abort(header)
            case Ended(request_ids=request_ids):
                for request_id in request_ids:
                    self._release(request_id, AttemptState.FINISHED)
            case Credit():  # belongs to the sockets' threads
                self.dropped["credit"] += 1
        return []

    def reject(self, header: Header, error: OmniError) -> list[Outgoing]:
        """Fail the request of a message that did not decode or could not be sent, from any sender."""
        attempt = self._live(header.request_id)
        if attempt is not None and header.stage and header.attempt < attempt.number:
            self.dropped["late"] += 1
            return []
        if attempt is not None or header.request_id in self._tombstones or not header.request_id:
            return self._fail(header.request_id, error)
        return self._refuse(header, error)  # it was never announced, but the coordinator has to hear of it

    def undelivered(self, request_id: str, receiver: ReplicaId, error: OmniError) -> list[Outgoing]:
        """Keep what is made for a later stage that takes no messages, until its successor asks for it."""
        attempt = self._attempts.get(request_id)
        entry = attempt.output.receivers.get(receiver.stage) if attempt is not None else None
        if attempt is None or entry is None or entry.replica_id != receiver or entry.unreachable:
            self.dropped["undelivered_of_ended_request"] += 1
            return []
        if not attempt.output.intact:
            return self._fail(request_id, error)
        entry.unreachable, entry.resend_from = True, None
        return self._result(attempt, Unreachable(receiver=receiver, attempt=entry.attempt))

    def step(self) -> list[Outgoing]:
        """Send some of what is to be sent again, then do one step of the engine; its events as messages."""
        messages = self._send_again()
        if self.engine.runnable():
            for event in self._step_engine():
                messages += self._on_event(event)
        return messages

    def _step_engine(self) -> Sequence[EngineEvent]:
        began = self._meter.clock()
        events = self.engine.step()
        scheduled = self.engine.take_scheduled()
        self._meter.stepped(began, took_all=scheduled is None)
        for engine_id, moment in scheduled or ():
            if (attempt := self._by_engine_id.get(engine_id)) is not None:
                self._meter.scheduled(attempt.timings, self._meter.clock.of(moment))
        return events

    def tick(self) -> list[Outgoing]:
        """End requests past their deadline and refuse early chunks whose announcement did not come."""
        now = self.clock()
        self._tombstones.expire(now)
        messages = []
        for attempt in list(self._attempts.values()):
            if attempt.live and attempt.deadline <= now:
                messages += self._fail(attempt.request_id, DeadlineExceeded("The request's deadline has passed."))
            elif attempt.state is AttemptState.FINISHED and attempt.deadline + FORGET_SECONDS <= now:
                self._end(attempt)
        for header in self._early.overdue(now):
            messages += self._refuse(header, ProtocolError("Input came, but its announcement did not."))
            self.dropped["early_expired"] += 1
        return messages

    def runnable(self) -> bool:
        """Whether there is output to send again, or the engine can do a step."""
        return bool(self._resending) or self.engine.runnable()

    @property
    def saturated(self) -> bool:
        """Whether the engine has, or holds, so much that more input should wait with its senders.

        Only while the engine can work: an edge is one queue for all requests, so the input that an admitted request
        waits for may be behind that of requests that are not admitted, and to hold it back would stop both sides for
        ever. What the engine can do without more input is finite: sooner or later it frees what it holds or has
        nothing left to do, and either way its senders get credit. By the same argument the stage after this one gives
        credit to this one, so what the engine makes never waits for ever.
        """
        if not (self.engine.runnable() or self.engine.busy()):
            return False
        complete = self._in_state[AttemptState.INPUT_COMPLETE]
        return complete > self._backlog_requests or self.engine.over_budget()

    def held(self) -> dict[str, int]:
        """What this stage holds now outside its engine; all zero when it is idle."""
        return {
            "requests": len(self._by_engine_id),
            **self._early.counts(),
            "retained": self._in_state[AttemptState.FINISHED],
            "retained_bytes": self._retained.used,
        }

    def counts(self) -> dict[str, int]:
        """What this stage and its engine hold now; all zero when it is idle."""
        return {
            **self.held(),
            "total_runs": self._runs,
            "dropped_retained": self._unretained,
            **{f"engine_{name}": value for name, value in self.engine.counts().items()},
        }

    def _live(self, request_id: str) -> Attempt | None:
        """The attempt at a request that this stage still has to finish."""
        attempt = self._attempts.get(request_id)
        return attempt if attempt is not None and attempt.live else None

    def _advance(self, attempt: Attempt, event: AttemptEvent) -> None:
        """Change the state of an attempt; raises `ProtocolError` for an event that has no place in it."""
        before, attempt.state = attempt.state, advance(ATTEMPT_TRANSITIONS, attempt.state, event)
        self._in_state[before] -= 1
        self._in_state[attempt.state] += 1
        if not attempt.live:
            self._by_engine_id.pop(attempt.request.request_id, None)
        if attempt.state is AttemptState.ENDED:
            del self._attempts[attempt.request_id]

    # -- inbound ------------------------------------------------------------------------------------------------------

    def _open(self, header: Header, request: OpenRequest, envelope: Envelope[IntoStage]) -> list[Outgoing]:
        request_id, number = header.request_id, header.attempt
        if self.identity not in request.route:
            self.dropped["foreign_epoch"] += 1
            return []
        previous = self._attempts.get(request_id)
        repeated = previous is not None and previous.live and number <= previous.number
        if repeated or self._tombstones.covers(request_id, number):
            self.dropped["opened_twice"] += 1
            return []
        if previous is not None:  # its abort comes later, or not at all
            self._end(previous)
        now = self.clock()
        if not header.deadline <= now + self._bounds.max_timeout + CLOCK_SECONDS:  # this refuses NaN, too
            text = f"Deadline must be a finite Unix timestamp, not too far away; got {header.deadline}."
            return self._refuse(header, ProtocolError(text))
        if (held := len(self._by_engine_id)) >= 2 * self._bounds.max_in_flight:  # ended ones may overlap with new
            return self._refuse(header, Overloaded(f"This stage has {held} open requests and takes no more."))
        attempt = self._attempt(header, request, envelope, now)
        self._attempts[request_id] = self._by_engine_id[attempt.request.request_id] = attempt
        self._in_state[attempt.state] += 1
        logger.debug("request opened", extra={"request_id": request_id})
        if (prompt := request.prompt) is not None and request.more_text is not None:
            return self._take_text(header, MoreText(prompt.only_text or "", final=not request.more_text))
        if prompt is not None:
            return self._apply(attempt, lambda: [start_of(prompt, envelope, self.engine.facts)])
        return [message for early in self._early.take(request_id) for message in self.receive(early)]

    def _attempt(self, header: Header, request: OpenRequest, envelope: Envelope[IntoStage], now: float) -> Attempt:
        receivers = [replica_id for replica_id in request.route if replica_id.stage in self._downstream]
        information = request.information.values(envelope.tensor)
        processor: StreamProcessor | None = Text2Speech(0, (CLIENT,)) if request.more_text is not None else None
        if self.processor_class is not None and self.stage.inputs is not None:
            processor = self.processor_class(self.stage.inputs.start_after, self.stage.source_names)
            processor.information = information
        return Attempt(
            header.request_id,
            StageRequest(
                request_id=f"{header.request_id}~{header.attempt}" if header.attempt else header.request_id,
                params=request.params,
                seed=request.seed,
                voice=request.voice,
                priority=request.priority,
                streams=bool(receivers) and not self._sends_text,
                information=information,
            ),
            request.route,
            header.attempt,
            header.deadline or now + self._bounds.default_timeout,
            now,
            InputOrder(self.stage.source_names if request.more_text is None else (CLIENT,)),
            processor,
            self._meter.opened(header.attempt, has_input=request.prompt is not None),
            ResendBuffer(self._retained, receivers, header.attempt),
            ResendBuffer(self._retained, [None], header.attempt),
        )

    def _take_text(self, header: Header, more: MoreText) -> list[Outgoing]:
        """The client's text goes on."""
        attempt = self._live(header.request_id)
        if attempt is None or header.attempt != attempt.number or not isinstance(attempt.processor, Text2Speech):
            self.dropped["late"] += 1
            return []
        if attempt.input_order.complete:  # another coordinator sends all of it once more
            return []
        if more.final:
            attempt.input_order.end(CLIENT)
        return self._apply(attempt, functools.partial(attempt.processor.add, more.text, more.start, more.final))

    def _take_chunk(self, header: Header, chunk: Chunk, envelope: Envelope[IntoStage]) -> list[Outgoing]:
        attempt = self._live(header.request_id)
        if attempt is None or header.attempt > attempt.number:
            return self._keep_early(header, envelope)
        source = header.sender
        if source is None or source not in attempt.route or header.attempt != attempt.number:
            self.dropped["foreign_epoch"] += 1
            return []
        processor = attempt.processor
        if header.stage not in self.stage.source_names or processor is None:
            self.dropped["unexpected_source"] += 1
            return []
        try:
            attempt.input_order.take(header.stage, header.seq, chunk.final)
        except ProtocolError as error:
            return self._fail(header.request_id, error)
        size = len(chunk.token_ids) + wire_size(envelope.buffers)
        self._meter.received(attempt.timings, source.name, header.sent, size)
        return self._apply(attempt, lambda: processor.feed(header.stage, InputPiece.of(chunk, envelope)))

    def _apply(self, attempt: Attempt, decide: Callable[[], Iterable[Action]]) -> list[Outgoing]:
        """Carry out a processor's actions; an error of the processor or the engine fails the request."""
        try:
            for action in decide():
                match action:
                    case Start(inputs=inputs):
                        self._runs += 1
                        self.engine.start(attempt.request, inputs)
                        self._advance(attempt, "started")
                        self._meter.started(attempt.timings)
                    case Extend(rows=rows, token_ids=token_ids, complete=complete):
                        self.engine.extend(attempt.request.request_id, rows, token_ids=token_ids, complete=complete)
                    case ExtendText(text=text, complete=complete):
                        self.engine.extend_text(attempt.request.request_id, text, complete=complete)
                    case Skip():
                        nothing = FinishedEvent(attempt.request.request_id, FinishReason.STOP, 0, 0)
                        return self._finish(attempt, nothing)
        except OmniError as error:
            return self._fail(attempt.request_id, error)
        except Exception as error:  # noqa: BLE001 - as far as we can tell this request's fault; the others go on
            about = {"request_id": attempt.request_id}
            logger.error("a request's input was refused: %s", trace_of(error), extra=about)
            return self._fail(attempt.request_id, EngineError(f"{type(error).__name__}: {error}."))
        if attempt.input_order.complete and attempt.state is AttemptState.RUNNING:
            self._advance(attempt, "input_ended")
        return []

    def _keep_early(self, header: Header, envelope: Envelope[IntoStage]) -> list[Outgoing]:
        if self._tombstones.covers(header.request_id, header.attempt):
            self.dropped["late"] += 1
            return []
        if self._early.put(envelope, self.clock()):
            return []
        self.dropped["early_overflow"] += 1
        return self._refuse(header, ProtocolError("Too much input came before its announcement."))

    # -- outbound -----------------------------------------------------------------------------------------------------

    def _on_event(self, event: EngineEvent) -> list[Outgoing]:
        attempt = self._by_engine_id.get(event.request_id)
        if attempt is None:
            self.dropped["event_of_ended_request"] += 1
            return []
        if isinstance(event, ErrorEvent):
            return self._fail(attempt.request_id, event.error)
        if isinstance(event, FinishedEvent):
            return self._finish(attempt, event)
        if not attempt.first_output and not isinstance(event, ProgressEvent):
            attempt.first_output = self.clock()
        self._meter.output(attempt.timings, event, self.stage.outputs)
        result, stream, length = divide(event, self.stage.outputs, attempt.streamed, sends_text=self._sends_text)
        messages = self._result(attempt, *result_of(result)) if result is not None else []
        if stream is not None and attempt.live:
            attempt.streamed += length
            messages += self._stream(attempt, stream)
        return messages

    def _stream(self, attempt: Attempt, event: StreamEvent) -> list[Outgoing]:
        """Keep a chunk, and send it to those later stages of the route that have all chunks before it."""
        attempt.stream_ended = attempt.stream_ended or event.final
        output = attempt.output
        if not output.receivers:
            return []
        chunk, buffers = chunk_of(event)
        if output.intact and not output.keep(chunk, buffers):
            self._unretained += 1
        receivers = output.receivers.values()
        behind = [stage for stage, receiver in output.receivers.items() if receiver.behind]
        if behind and not output.intact:
            text = f"A replica of {behind[0]!r} is not there, and this stage cannot keep more for its successor."
            return self._fail(attempt.request_id, StageLost(text, stage=self.stage.name))
        return [self._send_to(attempt, one, chunk, buffers) for one in receivers if not one.behind]

    def _finish(self, attempt: Attempt, event: FinishedEvent) -> list[Outgoing]:
        """The engine is done. Later stages hear of it even if the engine itself did not end the stream."""
        messages: list[Outgoing] = []
        if attempt.output.receivers and not attempt.stream_ended:
            end = StreamEvent(attempt.request.request_id, start=attempt.streamed, final=True)
            self._meter.output(attempt.timings, end)
            messages = self._stream(attempt, end)
            if not attempt.live:  # it failed: the end could not be kept for a stage that is not there
                return messages
        usage = StageUsage(
            finish_reason=event.reason,
            input_tokens=event.input_tokens,
            output_tokens=event.output_tokens,
            first_output=max(0.0, attempt.first_output - attempt.opened) if attempt.first_output else 0.0,
            finished=max(0.0, self.clock() - attempt.opened),
            stop_reason=event.stop_reason,
            picture_tokens=event.picture_tokens,
            language=event.language,
        )
        self._meter.done(attempt.timings, event.input_tokens, event.output_tokens)
        messages += self._result(attempt, StageDone(usage=usage, timeline=attempt.timings))
        if not attempt.live:  # it failed: the results could not be kept for the next coordinator
            return messages
        attempt.processor = None
        # Its information may be large, and its output is kept on.
        attempt.request = msgspec.structs.replace(attempt.request, information={})
        self._advance(attempt, "finished")
        self._bury(attempt.request_id, attempt.number)
        return messages

    def _fail(self, request_id: str, error: OmniError) -> list[Outgoing]:
        """End a request here and tell the coordinator, which ends it everywhere else."""
        attempt = self._attempts.get(request_id)
        if attempt is None:
            self.dropped["error_of_unknown_request"] += 1
            return []
        logger.info("request failed: %s", error.code.value, extra={"request_id": request_id})
        messages = self._result(attempt, Failed.from_error(error, self.stage.name))
        self._end(attempt, error.code.value)
        return messages

    def _refuse(self, header: Header, error: OmniError) -> list[Outgoing]:
        """Fail a request that is not announced here. If the announcement still comes, it is ignored."""
        self._release(header.request_id)  # an attempt before
        self._bury(header.request_id, header.attempt)
        own_header = Header.of(self.identity, header.request_id, header.attempt)
        return [Outgoing(None, own_header, Failed.from_error(error, self.stage.name))]

    def _result(self, attempt: Attempt, body: Body, buffers: Sequence[Frame] = ()) -> list[Outgoing]:
        """Keep a result, and send it to the coordinator if that has all results before it."""
        results = attempt.results
        (coordinator,) = results.receivers.values()
        if results.intact and not _is_passing(body) and not results.keep(body, buffers):
            self._unretained += 1
            if coordinator.resend_from is not None:
                text = "The coordinator does not have all results yet, and this stage cannot keep more of them."
                return self._fail(attempt.request_id, StageLost(text, stage=self.stage.name))
        if coordinator.unreachable or (coordinator.behind and not isinstance(body, Failed)):  # that ends it all
            return []
        return [self._send_to(attempt, coordinator, body, buffers)]

    def _send_to(self, attempt: Attempt, receiver: Receiver, body: Body, buffers: Sequence[Frame]) -> Outgoing:
        number, now = receiver.sent, self._meter.clock()
        receiver.sent += 1
        header = Header.of(self.identity, attempt.request_id, receiver.attempt, number, attempt.deadline, now)
        return Outgoing(receiver.replica_id, header, body, buffers)

    # -- sending again ------------------------------------------------------------------------------------------------

    def _resend(self, header: Header, body: Resend) -> list[Outgoing]:
        """A later stage starts again, or the coordinator: send all it got, some in each step, then what follows."""
        attempt = self._attempts.get(header.request_id)
        stage = stage_of(body.receiver)
        if attempt is not None and attempt.number > header.attempt:
            self.dropped["late"] += 1
            return []
        if attempt is None or attempt.number != header.attempt:
            return self._refuse(header, StageLost(f"Stage {stage} needs a request again that is unknown here."))
        kept = attempt.output if body.receiver is not None else attempt.results
        if stage not in kept.receivers or not kept.intact:
            return self._fail(header.request_id, StageLost(f"Stage {stage} needs output that is not kept here."))
        receiver = Receiver(body.receiver, body.attempt)
        if body.receiver is None:
            delivery = Delivery(body.delivered)
            delivery.replay(COUNTED.values())
            receiver = Receiver(None, attempt.number, body.first_seq, delivery=delivery)
        kept.restart(receiver)
        self._resending.append((attempt, kept, receiver))
        return []

    def _send_again(self) -> list[Outgoing]:
        messages: list[Outgoing] = []
        size = 0
        while self._resending and len(messages) < RESENT_MESSAGES and size < RESENT_BYTES:
            attempt, kept, receiver = self._resending[0]
            try:
                entry = kept.next_resend(receiver)
            except StageLost as error:
                messages += self._fail(attempt.request_id, error)
                continue
            if entry is not None:
                messages.append(self._send_to(attempt, receiver, *entry))
                size += wire_size(messages[-1].buffers)
            if receiver.resend_from is None:
                self._resending.popleft()
        return messages

    # -- another coordinator ------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """The coordinator is gone: keep all results until the next one asks for those of a request."""
        for attempt in self._attempts.values():
            for coordinator in attempt.results.receivers.values():
                coordinator.unreachable, coordinator.resend_from = True, None

    def held_requests(self) -> tuple[HeldRequest, ...]:
        """The requests whose results are all here, for the next coordinator; the newest ones if there are too many."""
        held = [attempt for attempt in self._attempts.values() if attempt.results.intact][-MAX_HELD:]
        return tuple(
            HeldRequest(
                attempt.request_id,
                attempt.number,
                attempt.request.seed,
                tuple(
                    (one.replica_id, one.attempt)
                    for one in attempt.output.receivers.values()
                    if one.replica_id is not None and not one.unreachable
                ),
            )
            for attempt in held
        )

    # -- ends ---------------------------------------------------------------------------------------------------------

    def drop_all(self) -> None:
        """The coordinator is lost, and with it every request: end them in the engine and report nothing."""
        for attempt in list(self._attempts.values()):
            self._end(attempt)

    def _abort(self, header: Header) -> None:
        """End this attempt and those before it; a later one goes on. Idempotent."""
        attempt = self._attempts.get(header.request_id)
        if attempt is None or attempt.number <= header.attempt:
            self._release(header.request_id)
            self._bury(header.request_id, header.attempt)

    def _release(self, request_id: str, only: AttemptState | None = None) -> None:
        """End the attempt at a request, or do so `only` in one state. Idempotent."""
        if (attempt := self._attempts.get(request_id)) is not None and only in (None, attempt.state):
            self._end(attempt)

    def _end(self, attempt: Attempt, outcome: str = "dropped") -> None:
        """End an attempt in any state; release all it holds."""
        if attempt.live:
            self._meter.failed(attempt.request_id, attempt.timings, outcome)
            self.engine.abort(attempt.request.request_id)
            self._bury(attempt.request_id, attempt.number)
        attempt.output.release()
        attempt.results.release()
        self._advance(attempt, "ended")

    def _bury(self, request_id: str, attempt: int) -> None:
        """Ignore what still comes for attempts up to this one; early chunks of a later one stay."""
        self._tombstones.add(request_id, self.clock(), attempt)
        self._early.drop(request_id, attempt)
