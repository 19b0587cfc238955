"""Counts a stage's work and notes the moments of its requests. One object per session, used on the main thread.

Nothing here takes a lock or does I/O; docs/decisions.md says what it costs.
"""

from __future__ import annotations

import collections
from collections.abc import Collection

import msgspec

from omni_actors.host.processes import AnchoredClock
from omni_actors.protocol.fields import ReplicaId
from omni_actors.protocol.messages import EndedWork, StageTimeline, transfer_from
from omni_actors.stage.engine_interface import (
    AudioEvent,
    ImageEvent,
    OutputEvent,
    ProgressEvent,
    StreamEvent,
    TextEvent,
)
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.metrics import Meters, Metric

COUNTERS = (table.INPUT_TOKENS, table.OUTPUT_TOKENS, table.STAGE_AUDIO, table.STAGE_PICTURES, table.HELD_BACK)
KEPT_TIMELINES = 256  # of requests that ended here without a `StageDone`, until the next snapshot


class StageMeter:
    """Counts for one replica."""

    def __init__(self, identity: ReplicaId) -> None:
        self.identity = identity
        self.clock = AnchoredClock()
        self.meters = Meters()
        self.labels = (identity.stage, str(identity.replica))
        self._steps = self.meters.histogram(table.STEP_SECONDS, *self.labels)
        self._queue = self.meters.histogram(table.QUEUE_SECONDS, *self.labels)
        self._outputs = self.meters.histogram(table.OUTPUT_SECONDS, *self.labels)
        for metric in COUNTERS:
            self.meters.set(metric, *self.labels, to=0)
        self._fresh: list[StageTimeline] = []  # handed to the engine since its last step
        self._unreported: collections.deque[EndedWork] = collections.deque(maxlen=KEPT_TIMELINES)

    def count(self, metric: Metric, by: float) -> None:
        """Increase a counter of this replica."""
        self.meters.count(metric, *self.labels, by=by)

    # -- moments of a request -----------------------------------------------------------------------------------------

    def opened(self, attempt: int, has_input: bool) -> StageTimeline:
        """Begin with the announcement, which comes with the input or before it."""
        now = self.clock()
        stage, replica = self.identity.stage, self.identity.replica
        return StageTimeline(
            stage, replica, self.identity.epoch, attempt, expected=now, first_input=now if has_input else 0.0
        )

    def received(self, timings: StageTimeline, source: str, sent: float, size: int) -> None:
        """Count a chunk of `size` payload bytes from the replica `source`, such as "thinker/0"."""
        now = self.clock()
        timings.first_input = timings.first_input or now
        transfer_from(timings.transfers, source).add(sent, now, size)
        if sent:
            self.meters.histogram(table.EDGE_LATENCY, source, self.identity.name).observe(now - sent)

    def started(self, timings: StageTimeline) -> None:
        """Note that the engine has the request."""
        timings.started = self.clock()
        self._fresh.append(timings)

    def stepped(self, began: float, took_all: bool) -> None:
        """Note the end of a step. `took_all`: it worked on all requests that were handed over before."""
        self._steps.observe(self.clock() - began)
        if self._fresh:
            if took_all:
                for timings in self._fresh:
                    self.scheduled(timings, began)
            self._fresh.clear()

    def scheduled(self, timings: StageTimeline, moment: float) -> None:
        """Note when the engine first scheduled the request."""
        if not timings.first_step:
            timings.first_step = moment
            self._queue.observe(moment - timings.started)

    def output(self, timings: StageTimeline, event: OutputEvent, outputs: Collection[str] = ()) -> None:
        """Note output of the request. `outputs`: modalities of the stage for the client."""
        now = self.clock()
        match event:
            case ProgressEvent():
                return  # no output yet
            case AudioEvent():
                self.count(table.STAGE_AUDIO, event.samples.shape[0] / event.sample_rate)
            case ImageEvent():
                self.count(table.STAGE_PICTURES, not event.preview)
            case TextEvent():
                self.count(table.OUTPUT_TOKENS, len(event.token_ids))
            case StreamEvent() if "text" not in outputs:  # a stage with text streams the same tokens again
                count = len(event.token_ids) if event.generated is None else event.generated
                self.count(table.OUTPUT_TOKENS, count)
        if not timings.first_output:
            timings.first_output = now
            if timings.started:  # otherwise there was nothing to compute
                self._outputs.observe(now - timings.started)
        timings.last_output = now

    def done(self, timings: StageTimeline, input_tokens: int, output_tokens: int) -> None:
        """End the attempt as done."""
        self.count(table.INPUT_TOKENS, input_tokens)
        timings.input_tokens, timings.output_tokens = input_tokens, output_tokens
        self._end(timings, "done")

    def failed(self, request_id: str, timings: StageTimeline, outcome: str) -> None:
        """End the attempt with another outcome."""
        self._end(timings, outcome)
        self._unreported.append(EndedWork(request_id, timings))

    def _end(self, timings: StageTimeline, outcome: str) -> None:
        timings.outcome, timings.ended = outcome, self.clock()
        self.meters.count(table.STAGE_REQUESTS, *self.labels, outcome)

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
