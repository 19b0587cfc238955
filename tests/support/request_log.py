"""A request log that tests drive by hand."""

from __future__ import annotations

import pytest

from omni_actors.protocol.fields import DType, Header, ReplicaId, TensorRef, pack_token_ids
from omni_actors.protocol.messages import AudioChunk, FinishReason, StageDone, StageTimeline, StageUsage, TextDelta
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.metrics import Meters
from omni_actors.telemetry.request_log import ObservedRequest, RequestLog
from tests.support.builders import submit
from tests.support.clock import Clock


class Observed:
    """A `RequestLog` with its clock and meters, and short ways to report events to it."""

    def __init__(self) -> None:
        self.clock = Clock(1000.0)
        self.meters = Meters()
        self.settled: list[ObservedRequest] = []
        self.log = RequestLog(self.meters, self.clock, self.settled.append)

    def begin(self, request_id: str = "r", **fields: object) -> None:
        self.log.admitted(request_id, submit(sent=self.clock.now - 0.25, **fields))
        self.log.bound(request_id, 0, (ReplicaId("thinker", 0, 1), ReplicaId("talker", 1, 1)), ("thinker", "talker"))

    def text(self, seconds: float, request_id: str = "r", tokens: int = 2) -> None:
        self.clock.now += seconds
        body = TextDelta(text="hi", token_ids=pack_token_ids([1] * tokens), sent=self.clock.now - 0.01)
        self.log.came(Header("", request_id, "thinker", 0, 1), body)
        self.log.delivered(request_id, body)

    def audio(self, seconds: float, request_id: str = "r") -> None:
        self.clock.now += seconds
        body = AudioChunk(samples=TensorRef(DType.F32, (24_000,), 0), sample_rate=24_000, sent=self.clock.now - 0.02)
        self.log.came(Header("", request_id, "talker", 1, 1), body)
        self.log.delivered(request_id, body)

    def stage(self, timeline: StageTimeline, request_id: str = "r") -> None:
        header = Header("", request_id, timeline.stage, timeline.replica, 1)
        self.log.stage_done(header, StageDone(usage=StageUsage(FinishReason.STOP), timeline=timeline))

    def value(self, metric: table.Metric, *labels: str) -> float:
        return self.meters.values.get((metric.name, labels), 0)

    def observations(self, metric: table.Metric, *labels: str) -> tuple[int, float]:
        """The number of observations of a histogram, and their approximate sum."""
        histogram = self.meters.histogram(metric, *labels)
        return sum(histogram.counts), pytest.approx(histogram.total)
