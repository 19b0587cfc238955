"""Counts a stage's work and notes the moments of its requests. One object per session, used on the main thread.

Nothing here takes a lock or does I/O; docs/decisions.md says what it costs.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from omni_actors.host.processes import AnchoredClock
from omni_actors.protocol.messages import EndedWork, StageTimeline
from omni_actors.stage.engine_interface import (
    AudioEvent,
    ImageEvent,
    OutputEvent,
    ProgressEvent,
    StreamEvent,
    TextEvent,
)
from omni_actors.stage.sound import USUAL_SECONDS, Pace
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.metrics import Meters, TransferTrack, track_of

PROVEN_SOUND = 5.0  # seconds of sound that a stage has to make before it reports for how many listeners it does
MOST_LISTENERS = 1_000_000  # that it reports
KEPT_TIMELINES = 256  # of requests that ended here without a `StageDone`, until the next snapshot


class HeldBack(enum.StrEnum):
    """Why a stage with work does not step."""

    DEVICE_PRIORITY = "device_priority"
    CREDIT = "credit"


@dataclass(slots=True)
class Track:
    """The moments of one attempt at a request; 0 for what did not happen."""

    request_id: str
    attempt: int
    expected: float
    first_input: float = 0.0
    started: float = 0.0
    first_step: float = 0.0
    first_output: float = 0.0
    last_output: float = 0.0
    ended: bool = False
    transfers: dict[str, TransferTrack] = field(default_factory=dict)


class StageMeter:
    """Counts for the replica `stage`/`replica`.

    Args:
        clock: for moments and durations; a new one by default.
    """

    def __init__(self, stage: str, replica: int, epoch: int, clock: AnchoredClock | None = None) -> None:
        self.clock = clock or AnchoredClock()
        self.meters = Meters()
        self.labels = (stage, str(replica))
        self.output_tokens = 0
        self.input_tokens = 0
        self.audio_seconds = 0.0
        self.pictures = 0
        self._sound = Pace(USUAL_SECONDS)  # of steps for their seconds of sound
        self._followed = 0.0  # of `audio_seconds`
        self.held_back: dict[str, float] = dict.fromkeys(HeldBack, 0.0)  # seconds
        self._stage, self._replica, self._epoch = stage, replica, epoch
        self._name = f"{stage}/{replica}"
        self._steps = self.meters.histogram(table.STEP_SECONDS, *self.labels)
        self._queue = self.meters.histogram(table.QUEUE_SECONDS, *self.labels)
        self._outputs = self.meters.histogram(table.OUTPUT_SECONDS, *self.labels)
        self._fresh: list[Track] = []  # handed to the engine since its last step
        self._unreported: collections.deque[EndedWork] = collections.deque(maxlen=KEPT_TIMELINES)

    # -- moments of a request -----------------------------------------------------------------------------------------

    def opened(self, request_id: str, attempt: int, has_input: bool) -> Track:
        """Begin with the announcement, which comes with the input or before it."""
        now = self.clock()
        return Track(request_id, attempt, now, first_input=now if has_input else 0.0)

    def received(self, track: Track, source: str, sent: float, size: int) -> None:
        """Count a chunk of `size` payload bytes from the replica `source`, such as "thinker/0"."""
        now = self.clock()
        if not track.first_input:
            track.first_input = now
        track_of(track.transfers, self.meters, source, self._name).add(sent, now, size)

    def started(self, track: Track) -> None:
        """Note that the engine has the request."""
        track.started = self.clock()
        self._fresh.append(track)

    def stepped(self, began: float, took_all: bool) -> None:
        """Note the end of a step. `took_all`: it worked on all requests that were handed over before."""
        seconds = self.clock() - began
        self._steps.observe(seconds)
        self._sound.add(seconds, self.audio_seconds - self._followed)
        self._followed = self.audio_seconds
        if self._fresh:
            if took_all:
                for track in self._fresh:
                    self.scheduled(track, began)
            self._fresh.clear()

    def scheduled(self, track: Track, moment: float) -> None:
        """Note when the engine first scheduled the request."""
        if not track.first_step:
            track.first_step = moment
            self._queue.observe(moment - track.started)

    def output(self, track: Track, event: OutputEvent, outputs: Collection[str] = ()) -> float:
        """Note output of the request; returns the moment. `outputs`: modalities of the stage for the client."""
        now = self.clock()
        match event:
            case ProgressEvent():
                return now  # no output yet
            case AudioEvent():
                self.audio_seconds += event.samples.shape[0] / event.sample_rate
            case ImageEvent():
                self.pictures += not event.preview
            case TextEvent():
                self.output_tokens += len(event.token_ids)
            case StreamEvent() if "text" not in outputs:  # a stage with text streams the same tokens again
                self.output_tokens += len(event.token_ids) if event.generated is None else event.generated
        if not track.first_output:
            track.first_output = now
            if track.started:  # otherwise there was nothing to compute
                self._outputs.observe(now - track.started)
        track.last_output = now
        return now

    def done(self, track: Track, input_tokens: int, output_tokens: int) -> StageTimeline:
        """End the attempt as done."""
        self.input_tokens += input_tokens
        return self._end(track, "done", input_tokens, output_tokens)

    def failed(self, track: Track, outcome: str) -> None:
        """End the attempt with another outcome, unless it has ended already."""
        if not track.ended:
            self._unreported.append(EndedWork(track.request_id, self._end(track, outcome)))

    def _end(self, track: Track, outcome: str, input_tokens: int = 0, output_tokens: int = 0) -> StageTimeline:
        track.ended = True
        self.meters.count(table.STAGE_REQUESTS, *self.labels, outcome)
        return StageTimeline(
            stage=self._stage,
            replica=self._replica,
            epoch=self._epoch,
            attempt=track.attempt,
            outcome=outcome,
            expected=track.expected,
            first_input=track.first_input,
            started=track.started,
            first_step=track.first_step,
            first_output=track.first_output,
            last_output=track.last_output,
            ended=self.clock(),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            transfers=tuple(transfer.timeline(source) for source, transfer in track.transfers.items()),
        )

    @property
    def listeners(self) -> int:
        """For how many listeners the stage makes sound as fast as they hear it; 0 until it has made enough to tell."""
        if self.audio_seconds < PROVEN_SOUND:
            return 0
        return min(MOST_LISTENERS, int(1 / self._sound.seconds)) if self._sound.seconds else 0

    # -- for the snapshot ---------------------------------------------------------------------------------------------

    def take_unreported(self, room: int) -> tuple[EndedWork, ...]:
        """Remove and return timelines of requests that ended without a `StageDone`, the oldest first.

        Args:
            room: bytes that they may take in a message. The others wait; one that is too long even alone is dropped.
        """
        taken: list[EndedWork] = []
        while self._unreported:
            size = len(msgspec.msgpack.encode(self._unreported[0]))
            if size > room and taken:
                break
            work = self._unreported.popleft()
            if size <= room:
                room -= size
                taken.append(work)
        return tuple(taken)
