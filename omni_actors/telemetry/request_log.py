"""Counts and times of requests, how their sound reaches listeners, and a timeline of each.

What stages report is by the clocks of their hosts, the rest by the coordinator's.
"""

from __future__ import annotations

import collections
import math
import secrets
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

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
    VideoChunk,
    WordsChunk,
    transfer_from,
)
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.metrics import Meters

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
FIRSTS = {"first_text": table.FIRST_TEXT, "first_audio": table.FIRST_AUDIO, "first_image": table.FIRST_PICTURE}
OF_DONE = (table.REQUEST_SECONDS, table.REALTIME_FACTOR, table.SMOOTH_START, table.AUDIO_GAPS)


class ObservedRequest(Struct):
    """A request since its admission, and for a while after its end."""

    timeline: RequestTimeline
    parent_id: str  # the caller's span, "" for none
    sampled: bool
    arrived: float
    firsts: set[str] = set()  # names of the events of first outputs
    playback: Playback = msgspec.field(default_factory=Playback)


class RequestLog(Observer):
    """Observes the coordinator's core; one per coordinator.

    Args:
        clock: Unix time that never jumps.
        on_settled: called once for each ended request, when all stages have reported on it.
    """

    def __init__(
        self, meters: Meters, clock: Callable[[], float], on_settled: Callable[[ObservedRequest], None] = lambda _: None
    ) -> None:
        self._meters = meters
        self._clock = clock
        self._on_settled = on_settled
        self._running: dict[str, ObservedRequest] = {}
        self._finished: collections.OrderedDict[str, ObservedRequest] = collections.OrderedDict()
        self._settling: collections.deque[tuple[float, str]] = collections.deque()
        for counter in (table.AUDIO_SECONDS, table.PICTURES, table.TEXT_TOKENS, table.REPLAYS):
            meters.set(counter, to=0)
        for histogram in (*FIRSTS.values(), *OF_DONE):
            meters.histogram(histogram)

    # -- the coordinator's core ---------------------------------------------------------------------------------------

    def refused(self, error: OmniError) -> None:
        """Count a refusal by its error code; it has no timeline."""
        self._meters.count(table.REQUESTS, "refused", error.code.value)

    def admitted(self, header: Header, submit: Submit) -> None:
        """Begin a timeline, in the caller's trace if the request names one."""
        now = self._clock()
        trace_id, parent_id, flags = secrets.token_hex(16), "", "01"
        if submit.traceparent is not None:
            _, trace_id, parent_id, flags = submit.traceparent.split("-")
        events = [TimelineEvent("admitted", now)]
        if header.sent and abs(now - header.sent) < CLIENT_CLOCK_SECONDS:
            events.insert(0, TimelineEvent("submitted", min(header.sent, now)))
        timeline = RequestTimeline(header.request_id, trace_id, events=events)
        self._running[header.request_id] = ObservedRequest(timeline, parent_id, bool(int(flags, 16) & 1), now)

    def bound(self, request_id: str, attempt: int, route: tuple[ReplicaId, ...], begun: Sequence[str]) -> None:
        """Note the route of an attempt, and when the stages that begin with it were informed."""
        timeline = self._running[request_id].timeline
        timeline.attempt = attempt
        names = " ".join(replica.name for replica in route)
        timeline.events.append(TimelineEvent("bound", self._clock(), names[:1024]))

    def replayed(self, request_id: str, error: OmniError, counts: bool) -> None:
        """Note a replay; `counts` is false for a consequence of one that was counted."""
        self._meters.count(table.REPLAYS, by=int(counts))
        events = self._running[request_id].timeline.events
        events.append(TimelineEvent("replayed", self._clock(), error.code.value))

    def came(self, header: Header, body: Output) -> None:
        """Add the transfer from the stage to the coordinator."""
        source, now = f"{header.stage}/{header.replica}", self._clock()
        deliveries = self._running[header.request_id].timeline.deliveries
        transfer_from(deliveries, source).add(header.sent, now, _payload(body))
        if header.sent:
            self._meters.histogram(table.EDGE_LATENCY, source, table.COORDINATOR[0]).observe(now - header.sent)

    def delivered(self, request_id: str, body: Output) -> None:
        """Count tokens, samples and pictures, and note the first of each."""
        request = self._running[request_id]
        match body:
            case TextDelta():
                self._meters.count(table.TEXT_TOKENS, by=len(body.token_ids) // TOKEN_BYTES)
                self._note_first(request, "first_text")
            case AudioChunk():
                seconds = body.samples.shape[0] / body.sample_rate
                self._meters.count(table.AUDIO_SECONDS, by=seconds)
                self._note_first(request, "first_audio")
                request.playback.add(self._clock(), seconds)
            case ImageChunk():
                self._meters.count(table.PICTURES, by=int(not body.preview))
                self._note_first(request, "first_image")
            case VideoChunk() | LatentsChunk() | WordsChunk() | StepsDone():
                pass

    def _note_first(self, request: ObservedRequest, name: str) -> None:
        if name not in request.firsts:
            request.firsts.add(name)
            now = self._clock()
            request.timeline.events.append(TimelineEvent(name, now))
            self._meters.histogram(FIRSTS[name]).observe(now - request.arrived)

    def stage_done(self, header: Header, body: StageDone) -> None:
        """Take over the stage's own timeline of the request."""
        if body.timeline is not None:
            self._add_stage(self._running[header.request_id], header.stage, header.replica, body.timeline)

    def ended(self, request_id: str, error: OmniError | None) -> None:
        """Complete the timeline and keep it among the last ones; `error` is None if the request is done."""
        request = self._running.pop(request_id)
        now = self._clock()
        code = error.code.value if error is not None else "ok"
        self._meters.count(table.REQUESTS, "failed" if error is not None else "done", code)
        timeline = request.timeline
        timeline.outcome = "done" if error is None else code
        timeline.events.append(TimelineEvent("ended", now, "" if error is None else code))
        if error is None:
            seconds, playback, histogram = now - request.arrived, request.playback, self._meters.histogram
            histogram(table.REQUEST_SECONDS).observe(seconds)
            if playback.seconds:
                histogram(table.REALTIME_FACTOR).observe(seconds / playback.seconds)
                histogram(table.SMOOTH_START).observe(playback.smooth_start - request.arrived)
                histogram(table.AUDIO_GAPS).observe(playback.gaps)
        self._finished[request_id] = request
        if error is None:
            self._on_settled(request)
        else:
            self._settling.append((now + SETTLE_SECONDS, request_id))
        while len(self._finished) > KEPT:
            self._finished.popitem(last=False)

    # -- reports of stages --------------------------------------------------------------------------------------------

    def stage_ended(self, stage: str, replica: int, work: EndedWork) -> None:
        """Add the part of a stage that did not finish the request."""
        request = self._known(work.request_id)
        if request is not None:
            self._add_stage(request, stage, replica, work.timeline)

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
        request = self._known(request_id)
        return request.timeline if request is not None else None

    def recent(self, count: int) -> list[RequestTimeline]:
        """Timelines of the requests that ended last, the newest first."""
        return [finished.timeline for finished in list(reversed(self._finished.values()))[:count]]

    def _known(self, request_id: str) -> ObservedRequest | None:
        return self._running.get(request_id) or self._finished.get(request_id)

    @staticmethod
    def _add_stage(request: ObservedRequest, stage: str, replica: int, timeline: StageTimeline) -> None:
        if len(request.timeline.stages) < KEPT_STAGES:
            # The stage and the replica are those of the connection, whatever the message claims.
            timeline.stage, timeline.replica = stage, replica
            request.timeline.stages.append(timeline)


def _payload(body: Output) -> int:
    if isinstance(body, TextDelta):
        return len(body.token_ids) + len(body.text)
    return sum(math.prod(ref.shape) * ref.dtype.itemsize for ref in body.tensor_refs())
