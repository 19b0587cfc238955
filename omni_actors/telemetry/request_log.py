"""Counts and times of requests, how their sound reaches listeners, and a timeline of each.

Times are by the coordinator's anchored clock. `ClockOffset`s convert what stages report.
"""

from __future__ import annotations

import collections
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from omni_actors.coordinator.core.instructions import Observer
from omni_actors.errors import OmniError
from omni_actors.protocol.fields import Header, ReplicaId
from omni_actors.protocol.messages import (
    AudioChunk,
    EndedWork,
    ImageChunk,
    LatentsChunk,
    Output,
    RequestTimeline,
    StageDone,
    StageTimeline,
    StepsDone,
    Submit,
    TextDelta,
    TimelineEvent,
    TransferTimeline,
)
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.metrics import Histogram, Meters, TransferTrack, track_of
from omni_actors.telemetry.timeline import PHASES, replica_name

AUDIBLE_SECONDS = 0.05  # a gap at least this long is heard as one


class Playback:
    """The arrival of one answer's sound, piece by piece; moments in seconds, all by one clock.

    Two listeners are thought of. One presses play at the first sample and hears a gap wherever the next piece is not
    there yet. The other waits until the earliest moment from which there is none: the smooth start.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Length of the sound so far."""
        self.first = 0.0
        """When the first piece came; 0 while none has."""
        self.smooth_start = 0.0
        """The earliest moment at which to press play and hear no gap in what has come so far."""
        self.longest_gap = 0.0
        """Seconds of the longest gap when play began at `first`."""
        self.runs_out = 0.0
        """When who pressed play at `first` has heard everything that has come so far."""

    def add(self, now: float, seconds: float) -> None:
        """Note a piece that came `now` and is `seconds` long."""
        if not self.first:
            self.first = self.runs_out = now
        self.smooth_start = max(self.smooth_start, now - self.seconds)
        self.longest_gap = max(self.longest_gap, now - self.runs_out)
        self.runs_out = max(self.runs_out, now) + seconds
        self.seconds += seconds

    @property
    def gaps(self) -> float:
        """Seconds of all gaps when play began at `first`: how much earlier that was than the smooth start."""
        return self.smooth_start - self.first

    @property
    def stalled(self) -> bool:
        """Whether that listener has heard a gap."""
        return self.longest_gap > AUDIBLE_SECONDS


KEPT = 200  # timelines of requests that have ended
KEPT_STAGES = 64  # parts of one request, over all attempts
CLIENT_CLOCK_SECONDS = 60.0  # a client's clock that differs by more is ignored
SETTLE_SECONDS = 2.5  # after which all stages have reported how a failed request ended there
TOKEN_BYTES = 4

MOMENTS = ("expected", *(moment for _, moment in PHASES))  # the fields of a stage's timeline that a clock fills


@dataclass
class _RunningRequest:
    """A request between its admission and its end. Moments of stages are by their own clocks."""

    trace_id: str
    parent_id: str  # the caller's span, "" for none
    sampled: bool
    arrived: float
    events: list[TimelineEvent]
    attempt: int = 0
    bound: dict[str, float] = field(default_factory=dict)  # by stage: when its present attempt was announced to it
    stages: list[StageTimeline] = field(default_factory=list)
    deliveries: dict[str, TransferTrack] = field(default_factory=dict)
    firsts: set[str] = field(default_factory=set)  # names of the events of first outputs
    playback: Playback = field(default_factory=Playback)


@dataclass(frozen=True)
class FinishedRequest:
    """A request that has ended."""

    timeline: RequestTimeline
    parent_id: str
    sampled: bool


class RequestLog(Observer):
    """Observes the coordinator's core; one per coordinator.

    Args:
        clock: Unix time that never jumps.
        on_settled: called once for each ended request, when all stages have reported on it.
    """

    def __init__(
        self, meters: Meters, clock: Callable[[], float], on_settled: Callable[[FinishedRequest], None] = lambda _: None
    ) -> None:
        self._meters = meters
        self._clock = clock
        self._on_settled = on_settled
        self._running: dict[str, _RunningRequest] = {}
        self._finished: collections.OrderedDict[str, FinishedRequest] = collections.OrderedDict()
        self._settling: collections.deque[tuple[float, str]] = collections.deque()
        self._offsets: collections.defaultdict[str, ClockOffset] = collections.defaultdict(ClockOffset)
        self._request_seconds = meters.histogram(table.REQUEST_SECONDS)
        self._first_text = meters.histogram(table.FIRST_TEXT)
        self._first_audio = meters.histogram(table.FIRST_AUDIO)
        self._first_picture = meters.histogram(table.FIRST_PICTURE)
        self._smooth_start = meters.histogram(table.SMOOTH_START)
        self._speech_wait = meters.histogram(table.SPEECH_WAIT)
        self._audio_gaps = meters.histogram(table.AUDIO_GAPS)
        self._factor = meters.histogram(table.REALTIME_FACTOR)
        for metric in (table.AUDIO_SECONDS, table.PICTURES, table.TEXT_TOKENS, table.REPLAYS):
            meters.set(metric, to=0)

    # -- clocks -------------------------------------------------------------------------------------------------------

    def message_received(self, name: str, sent: float) -> None:
        """Note that a message of the replica `name` just came; `sent` is when it was sent, by the replica's clock."""
        self._offsets[name].received(sent, self._clock())

    def forget_clock(self, name: str) -> None:
        """Forget a replica's clock: its new process has another one."""
        self._offsets.pop(name, None)

    def offset(self, name: str) -> float:
        """Seconds to add to a replica's moments to have ours."""
        known = self._offsets.get(name)
        return known.seconds if known is not None else 0.0

    # -- the coordinator's core ---------------------------------------------------------------------------------------

    def refused(self, error: OmniError) -> None:
        """Count a refusal by its error code; it has no timeline."""
        self._meters.count(table.REQUESTS, "refused", error.code.value)

    def admitted(self, request_id: str, submit: Submit) -> None:
        """Begin a timeline, in the caller's trace if the request names one."""
        now = self._clock()
        trace_id, parent_id, flags = secrets.token_hex(16), "", "01"
        if submit.traceparent is not None:
            _, trace_id, parent_id, flags = submit.traceparent.split("-")
        events = [TimelineEvent("admitted", now)]
        if submit.sent and abs(now - submit.sent) < CLIENT_CLOCK_SECONDS:
            events.insert(0, TimelineEvent("submitted", min(submit.sent, now)))
        self._running[request_id] = _RunningRequest(trace_id, parent_id, bool(int(flags, 16) & 1), now, events)

    def bound(self, request_id: str, attempt: int, route: tuple[ReplicaId, ...], begun: Sequence[str]) -> None:
        """Note the route of an attempt, and when the stages that begin with it were informed."""
        request = self._running.get(request_id)
        if request is not None:
            now = self._clock()
            request.attempt = attempt
            request.bound.update(dict.fromkeys(begun, now))
            names = " ".join(replica.name for replica in route)
            request.events.append(TimelineEvent("bound", now, names[:1024]))

    def speech_begun(self, request_id: str, waited: float) -> None:
        """Note how long its speech has waited."""
        self._speech_wait.observe(waited)

    def replayed(self, request_id: str, error: OmniError, counts: bool) -> None:
        """Note a replay; `counts` is false for a consequence of one that was counted."""
        self._meters.count(table.REPLAYS, by=int(counts))
        request = self._running.get(request_id)
        if request is not None:
            request.events.append(TimelineEvent("replayed", self._clock(), error.code.value))

    def came(self, header: Header, body: Output) -> None:
        """Add the transfer from the stage to the coordinator."""
        request = self._running.get(header.request_id)
        if request is None:
            return
        source = f"{header.stage}/{header.replica}"
        track = track_of(request.deliveries, self._meters, source, table.COORDINATOR[0])
        track.add(body.sent, self._clock(), _payload(body), self.offset(source))

    def delivered(self, request_id: str, body: Output) -> None:
        """Count tokens, samples and pictures, and note the first of each."""
        request = self._running.get(request_id)
        if request is None:
            return
        match body:
            case TextDelta():
                self._meters.count(table.TEXT_TOKENS, by=len(body.token_ids) // TOKEN_BYTES)
                self._note_first(request, "first_text", self._first_text)
            case AudioChunk():
                self._note_sound(request, body.samples.shape[0] / body.sample_rate)
            case ImageChunk():
                self._meters.count(table.PICTURES, by=int(not body.preview))
                self._note_first(request, "first_image", self._first_picture)
            case LatentsChunk() | StepsDone():
                pass

    def _note_first(self, request: _RunningRequest, name: str, seconds: Histogram) -> None:
        if name not in request.firsts:
            request.firsts.add(name)
            now = self._clock()
            request.events.append(TimelineEvent(name, now))
            seconds.observe(now - request.arrived)

    def _note_sound(self, request: _RunningRequest, seconds: float) -> None:
        self._meters.count(table.AUDIO_SECONDS, by=seconds)
        self._note_first(request, "first_audio", self._first_audio)
        request.playback.add(self._clock(), seconds)

    def stage_done(self, header: Header, body: StageDone) -> None:
        """Take over the stage's own timeline of the request."""
        request = self._running.get(header.request_id)
        if request is None or body.timeline is None:
            return
        offset = self._offsets[f"{header.stage}/{header.replica}"]
        offset.sent(request.bound.get(header.stage, 0.0), body.timeline.expected)
        self._add_stage(request, header.stage, header.replica, body.timeline)

    def ended(self, request_id: str, error: OmniError | None) -> None:
        """Complete the timeline and keep it among the last ones; `error` is None if the request is done."""
        request = self._running.pop(request_id, None)
        if request is None:
            return
        now = self._clock()
        code = error.code.value if error is not None else "ok"
        self._meters.count(table.REQUESTS, "failed" if error is not None else "done", code)
        request.events.append(TimelineEvent("ended", now, "" if error is None else code))
        if error is None:
            self._request_seconds.observe(now - request.arrived)
            if request.playback.seconds:
                self._factor.observe((now - request.arrived) / request.playback.seconds)
                self._smooth_start.observe(request.playback.smooth_start - request.arrived)
                self._audio_gaps.observe(request.playback.gaps)
        timeline = self._timeline(request_id, request, "done" if error is None else code)
        self._finished[request_id] = FinishedRequest(timeline, request.parent_id, request.sampled)
        if error is None:
            self._on_settled(self._finished[request_id])
        else:
            self._settling.append((now + SETTLE_SECONDS, request_id))
        while len(self._finished) > KEPT:
            self._finished.popitem(last=False)

    # -- reports of stages --------------------------------------------------------------------------------------------

    def stage_ended(self, stage: str, replica: int, work: EndedWork) -> None:
        """Add the part of a stage that did not finish the request."""
        request = self._running.get(work.request_id)
        if request is not None:
            self._add_stage(request, stage, replica, work.timeline)
            return
        finished = self._finished.get(work.request_id)
        if finished is not None and len(finished.timeline.stages) < KEPT_STAGES:
            reported = msgspec.structs.replace(work.timeline, stage=stage, replica=replica)
            stages = (*finished.timeline.stages, self._in_our_time(reported))
            timeline = msgspec.structs.replace(finished.timeline, stages=stages)
            self._finished[work.request_id] = FinishedRequest(timeline, finished.parent_id, finished.sampled)

    def tick(self) -> None:
        """Pass on requests that failed a while ago. Call it a few times a second."""
        now = self._clock()
        while self._settling and self._settling[0][0] <= now:
            _, request_id = self._settling.popleft()
            finished = self._finished.get(request_id)
            if finished is not None:
                self._on_settled(finished)

    # -- queries ------------------------------------------------------------------------------------------------------

    def timeline(self, request_id: str) -> RequestTimeline | None:
        """The timeline of a running request or of one of the last that ended; else `None`."""
        request = self._running.get(request_id)
        if request is not None:
            return self._timeline(request_id, request, "running")
        finished = self._finished.get(request_id)
        return finished.timeline if finished is not None else None

    def recent(self, count: int) -> list[RequestTimeline]:
        """Timelines of the requests that ended last, the newest first."""
        return [finished.timeline for finished in list(reversed(self._finished.values()))[:count]]

    # -- timelines ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _add_stage(request: _RunningRequest, stage: str, replica: int, timeline: StageTimeline) -> None:
        if len(request.stages) < KEPT_STAGES:
            # The stage and the replica are those of the connection, whatever the message claims.
            request.stages.append(msgspec.structs.replace(timeline, stage=stage, replica=replica))

    def _timeline(self, request_id: str, request: _RunningRequest, outcome: str) -> RequestTimeline:
        return RequestTimeline(
            request_id=request_id,
            trace_id=request.trace_id,
            outcome=outcome,
            attempt=request.attempt,
            events=tuple(request.events),
            stages=tuple(self._in_our_time(stage) for stage in request.stages),
            deliveries=tuple(
                self._transfer_in_our_time(track.timeline(source), 0.0) for source, track in request.deliveries.items()
            ),
        )

    def _in_our_time(self, stage: StageTimeline) -> StageTimeline:
        offset = self.offset(replica_name(stage))
        moments = {name: _shift(getattr(stage, name), offset) for name in MOMENTS}
        transfers = tuple(self._transfer_in_our_time(transfer, offset) for transfer in stage.transfers)
        return msgspec.structs.replace(stage, **moments, transfers=transfers)

    def _transfer_in_our_time(self, transfer: TransferTimeline, receiver: float) -> TransferTimeline:
        sender = self.offset(transfer.source)
        return msgspec.structs.replace(
            transfer,
            first_sent=_shift(transfer.first_sent, sender),
            first_received=_shift(transfer.first_received, receiver),
            last_sent=_shift(transfer.last_sent, sender),
            last_received=_shift(transfer.last_received, receiver),
        )


def _shift(moment: float, offset: float) -> float:
    return max(0.0, moment + offset) if moment else 0.0


def _payload(body: Output) -> int:
    if isinstance(body, TextDelta):
        return len(body.token_ids) + len(body.text)
    return sum(math.prod(ref.shape) * ref.dtype.itemsize for ref in body.tensor_refs())


KEPT = 64  # observations in each direction; older ones say less, as clocks drift


class ClockOffset:
    """Estimates `seconds`, to be added to a peer's moments to have ours, from messages in both directions.

    A message cannot arrive before it was sent. So our time of receipt minus the peer's time of sending is an upper
    bound of the offset; our time of sending minus the peer's time of receipt is a lower bound. While zero lies between
    the two, the clocks count as equal, as those of one host are. Otherwise the middle is the estimate, and it is wrong
    by at most half the distance.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._upper: collections.deque[float] = collections.deque(maxlen=KEPT)
        self._lower: collections.deque[float] = collections.deque(maxlen=KEPT)

    def received(self, sent_there: float, received_here: float) -> None:
        """Take the times of a message from the peer: sent by its clock, received by ours."""
        if sent_there:
            self._upper.append(received_here - sent_there)
            self._forget_contradiction(self._lower)
            self.seconds = self._estimate()

    def sent(self, sent_here: float, received_there: float) -> None:
        """Take the times of a message to the peer: sent by our clock, received by its clock."""
        if sent_here and received_there:
            self._lower.append(sent_here - received_there)
            self._forget_contradiction(self._upper)
            self.seconds = self._estimate()

    def _forget_contradiction(self, older: collections.deque[float]) -> None:
        """If the bounds contradict each other, a clock was set: forget what was observed before."""
        if self._upper and self._lower and min(self._upper) < max(self._lower):
            older.clear()
            newest = self._upper if older is self._lower else self._lower
            last = newest[-1]
            newest.clear()
            newest.append(last)

    def _estimate(self) -> float:
        upper = min(self._upper) if self._upper else None
        lower = max(self._lower) if self._lower else None
        if upper is not None and lower is not None:
            return 0.0 if lower <= 0.0 <= upper else (upper + lower) / 2
        if upper is not None:
            return min(upper, 0.0)
        return max(lower, 0.0) if lower is not None else 0.0
