"""What is observed: the table, counting, merging, clocks, timelines, and their pictures. No process, no socket."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from omni_actors.errors import EngineError, InvalidPayload, Overloaded, StageLost
from omni_actors.protocol.codec import encode
from omni_actors.protocol.fields import pack_token_ids
from omni_actors.protocol.header import Header, Limits, ReplicaId
from omni_actors.protocol.results import AudioChunk, FinishReason, StageDone, StageUsage, TextDelta
from omni_actors.protocol.telemetry import (
    EndedWork,
    HistogramSample,
    HopTimeline,
    RequestTimeline,
    Sample,
    Snapshot,
    StageTimeline,
    TimelineEvent,
)
from omni_actors.protocol.tensors import DType, TensorRef
from omni_actors.stage import snapshot as figures
from omni_actors.stage.echo import EchoEngine
from omni_actors.stage.engine_interface import EngineStatistics
from omni_actors.stage.meter import KEPT_TIMELINES, StageMeter
from omni_actors.stage.snapshot import Baseline
from omni_actors.telemetry import metric_table as table
from omni_actors.telemetry.chart import Chart, chart
from omni_actors.telemetry.clocks import AnchoredClock, ClockOffset
from omni_actors.telemetry.collector import TelemetryCollector
from omni_actors.telemetry.drawing import duration, page, size, svg
from omni_actors.telemetry.merge import StageMeters
from omni_actors.telemetry.meters import Histogram, Meters
from omni_actors.telemetry.metric_table import TABLE, Kind
from omni_actors.telemetry.otlp import SpanExport
from omni_actors.telemetry.process_metrics import edge_metrics
from omni_actors.telemetry.prometheus import render
from omni_actors.telemetry.request_log import KEPT, SETTLE_SECONDS, Finished, RequestLog
from omni_actors.transport.credit import EdgeMetrics, Traffic
from tests.support.builders import pipeline, submit
from tests.support.clock import Clock
from tests.unit.test_actor import StageUnderTest

ROOT = Path(__file__).resolve().parents[2]
TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
LABELS = ("talker", "0")


def parsed(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values in order of their names -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in sorted(sample.labels))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


# -- table ------------------------------------------------------------------------------------------------------------


def test_the_table_keeps_the_rules_of_prometheus() -> None:
    for metric in TABLE.values():
        assert re.fullmatch(r"omni_[a-z0-9_]+", metric.name), metric.name
        assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total"), metric.name
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.bounds), metric.name
        assert list(metric.bounds) == sorted(set(metric.bounds)), metric.name
        assert metric.help.endswith("."), metric.name
        assert not re.search(r"_(count|sum|bucket|milliseconds|ms|percent)$", metric.name), metric.name
        assert "le" not in metric.labels
        if metric.kind is Kind.HISTOGRAM and metric is not table.REALTIME_FACTOR:
            assert metric.name.endswith("_seconds"), metric.name


def test_the_documentation_has_this_table() -> None:
    """Write it with `python -m omni_actors.telemetry.metric_table`."""
    assert table.markdown() in (ROOT / "docs" / "observability.md").read_text()


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) >= 15
    for query in queries:
        named = re.findall(r"\bomni_[a-z0-9_]+", query)
        assert named, query
        for name in named:
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            metric = TABLE.get(name) or TABLE.get(base)
            assert metric is not None, f"{name} in {query}"
            assert (name != metric.name) == (metric.kind is Kind.HISTOGRAM), query
            for group in re.findall(r"by \(([^)]*)\)", query):
                assert {label.strip() for label in group.split(",")} <= {*metric.labels, "le"}, query
        for counter in re.findall(r"\b(omni_[a-z0-9_]+(?:_total|_bucket|_sum|_count))\b", query):
            assert re.search(rf"(rate|increase)\({counter}", query), f"{counter} is not rated in {query}"


# -- counting ---------------------------------------------------------------------------------------------------------


def test_a_histogram_counts_a_bound_into_its_own_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (-5.0, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 7.5  # what is less than nothing counts as nothing


def snapshot(tokens: float = 0, steps: tuple[int, ...] | None = None, held: float = 0) -> Snapshot:
    counts = steps or (0,) * (len(table.STEP_SECONDS.bounds) + 1)
    return Snapshot(
        samples=(Sample(table.OUTPUT_TOKENS.name, LABELS, tokens), Sample(table.STAGE_HELD.name, LABELS, held)),
        histograms=(HistogramSample(table.STEP_SECONDS.name, LABELS, counts, float(sum(counts))),),
    )


def totals(stages: StageMeters) -> Meters:
    meters = Meters()
    stages.add_to(meters)
    return meters


def test_counters_go_on_after_a_restart_and_gauges_do_not() -> None:
    stages = StageMeters()
    tokens, held = (table.OUTPUT_TOKENS.name, LABELS), (table.STAGE_HELD.name, LABELS)
    steps = (2,) + (0,) * len(table.STEP_SECONDS.bounds)
    stages.take("talker/0", snapshot(5, steps, held=3))
    stages.take("talker/0", snapshot(7, steps, held=3))  # the same process, later
    assert totals(stages).values == {tokens: 7, held: 3}
    stages.gone("talker/0")
    stages.gone("talker/0")
    assert totals(stages).values == {tokens: 7}
    stages.take("talker/0", snapshot(1, steps, held=1))
    assert totals(stages).values == {tokens: 8, held: 1}
    assert totals(stages).histograms[(table.STEP_SECONDS.name, LABELS)].counts[0] == 4
    assert totals(stages).values == {tokens: 8, held: 1}, "asking changes nothing"


@pytest.mark.parametrize(
    "wrong",
    [
        Snapshot(samples=(Sample("omni_unheard_of", LABELS, 1.0),)),
        Snapshot(samples=(Sample(table.OUTPUT_TOKENS.name, ("talker",), 1.0),)),
        Snapshot(samples=(Sample(table.OUTPUT_TOKENS.name, LABELS, -1.0),)),
        Snapshot(samples=(Sample(table.STAGE_HELD.name, LABELS, math.nan),)),
        Snapshot(samples=(Sample(table.STEP_SECONDS.name, LABELS, 1.0),)),
        Snapshot(samples=(), histograms=(HistogramSample(table.STEP_SECONDS.name, LABELS, (1, 2), 1.0),)),
        Snapshot(samples=(), histograms=(HistogramSample(table.STAGE_HELD.name, LABELS, (1, 2), 1.0),)),
    ],
    ids=["name", "labels", "negative counter", "not a number", "a histogram", "buckets", "no histogram"],
)
def test_a_snapshot_that_is_not_after_the_table_changes_nothing(wrong: Snapshot) -> None:
    stages = StageMeters()
    stages.take("talker/0", snapshot(5))
    with pytest.raises(InvalidPayload):
        stages.take("talker/0", wrong)
    assert totals(stages).values[(table.OUTPUT_TOKENS.name, LABELS)] == 5


def test_a_wrong_snapshot_is_counted_and_the_rest_of_the_pipeline_shown() -> None:
    watch = TelemetryCollector()
    watch.spawned("talker", 0, 0)
    watch.spawned("talker", 0, 7)
    watch.took("talker", 0, snapshot(5))
    watch.took("talker", 0, Snapshot(samples=(Sample("omni_unheard_of", LABELS, 1.0),)))
    watch.spawned("talker", 0, 7)
    watch.spawned("talker", 0, 8)
    everything = watch.gather(3, 4, {("talker", 0): (False, 2)}, {}, {"client": {"magic": 6}}, {"late": 7})
    value = everything.values
    assert value[(table.OUTPUT_TOKENS.name, LABELS)] == 5
    assert value[(table.REJECTED.name, ("coordinator", "0", "control", "wrong_snapshot"))] == 1
    assert value[(table.REJECTED.name, ("coordinator", "0", "client", "magic"))] == 6
    assert value[(table.DROPPED.name, ("coordinator", "0", "late"))] == 7
    assert (value[(table.IN_FLIGHT.name, ())], value[(table.RETAINED.name, ())]) == (3, 4)
    assert (value[(table.READY.name, LABELS)], value[(table.BOUND.name, LABELS)]) == (0, 2)
    assert value[(table.RESTARTS.name, LABELS)] == 1, "the first start is none"


def test_rendered_text_is_what_prometheus_reads() -> None:
    meters = Meters()
    meters.count(table.REQUESTS, "failed", 'a "quoted"\nreason\\')
    meters.count(table.REQUESTS, "done", "ok", by=3)
    histogram = meters.histogram(table.STEP_SECONDS, *LABELS)
    histogram.observe(0.0005)
    histogram.observe(1e9)
    text = render(meters)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {family.documentation for family in families.values()} == {metric.help for metric in TABLE.values()}
    assert len(families) == len(TABLE)
    found = parsed(text)
    assert found["omni_requests_total"] == {('a "quoted"\nreason\\', "failed"): 1, ("ok", "done"): 3}
    buckets = [value for labels, value in found["omni_stage_step_seconds_bucket"].items()]
    assert buckets == sorted(buckets), "cumulated"
    assert (buckets[0], buckets[-2], buckets[-1]) == (1, 1, 2)
    assert found["omni_stage_step_seconds_count"] == {("0", "talker"): 2}


def test_edges_that_are_gone_keep_their_counts_only() -> None:
    traffic = Traffic()
    traffic.messages, traffic.bytes, traffic.shared_bytes = 3, 300, 4000
    meters = Meters()
    edge_metrics(meters, "a/0", {"b/0": traffic.figures()._replace(open=True, messages_out=1, credit=9, waiting=2)})
    assert meters.values[(table.EDGE_CREDIT.name, ("a/0", "b/0"))] == 9
    edge_metrics(meters, "a/0", {"b/0": EdgeMetrics(4, 400, 4000)})
    assert meters.values == {
        (table.EDGE_MESSAGES.name, ("a/0", "b/0")): 4,
        (table.EDGE_BYTES.name, ("a/0", "b/0")): 400,
        (table.EDGE_SHARED.name, ("a/0", "b/0")): 4000,
    }


class CountingEngine(EchoEngine):
    """An echo engine with a scheduler that has counted before."""

    preemptions, running = 5, 1

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(self.running, 0, 0.5, self.preemptions, 10 * self.preemptions, self.preemptions)


def test_a_session_tells_only_what_came_after_its_beginning() -> None:
    engine = CountingEngine(pipeline().stage("talker"))
    baseline = Baseline(engine)
    engine.preemptions, engine.running = 7, 3
    assert baseline.statistics() == EngineStatistics(3, 0, 0.5, 2, 20, 2)
    assert 0 <= baseline.processor_time < 5
    assert Baseline(EchoEngine(pipeline().stage("talker"))).statistics() is None


def told(meter: StageMeter, limit: int) -> Snapshot:
    """The next snapshot of a stage that counts with `meter`."""
    engine = EchoEngine(pipeline().stage("talker"))
    actor = StageUnderTest("talker", engine, meter=meter).actor
    return figures.snapshot(meter, actor, Baseline(engine), {}, {}, {}, limit)


def end_many(meter: StageMeter, count: int, sources: int = 1) -> list[str]:
    """Requests that fail; the names of the last ones, of which a meter keeps the timelines."""
    names = [f"request-{index:04}" for index in range(count)]
    for name in names:
        track = meter.expected(name, 0, has_input=False)
        for source in range(sources):
            meter.received(track, f"thinker/{source}", 999.0, 100)
        meter.failed(track, "engine_error")
    return names[-KEPT_TIMELINES:]


def test_a_snapshot_fits_its_message_and_the_other_timelines_come_with_the_next_ones() -> None:
    meter = StageMeter("talker", 0, 5, AnchoredClock(Clock(1000.0), Clock(0.0)))
    end_many(meter, 1)
    figures_alone = told(meter, 0)  # the figures are sent even where there is no room for a timeline
    assert figures_alone.samples
    assert not figures_alone.ended
    limits = Limits(body_bytes=len(encode(Header(""), figures_alone)[2]) + 12_000)
    names = end_many(meter, KEPT_TIMELINES + 10)
    seen: list[str] = []
    for _ in range(KEPT_TIMELINES):
        one = told(meter, limits.body_bytes)
        size = len(encode(Header(""), one, limits=limits)[2])  # which raises if it does not fit
        seen += [work.request_id for work in one.ended]
        if len(seen) == len(names):
            break
        assert one.ended
        assert size > limits.body_bytes - 300, "as many as fit"
    assert seen == names
    assert told(meter, 1 << 20).ended == ()


def test_a_timeline_that_fits_in_no_message_does_not_keep_the_others_back() -> None:
    meter = StageMeter("talker", 0, 5, AnchoredClock(Clock(1000.0), Clock(0.0)))
    end_many(meter, 1, sources=60)
    names = end_many(meter, 3)
    assert [work.request_id for work in meter.take_unreported(2000)] == names
    assert meter.take_unreported(1 << 20) == ()


# -- clocks -----------------------------------------------------------------------------------------------------------


def test_a_clock_does_not_follow_when_the_wall_clock_is_set() -> None:
    wall, monotonic = Clock(5000.0), Clock(10.0)
    clock = AnchoredClock(wall, monotonic)
    wall.now, monotonic.now = 0.0, 12.5
    assert clock() == 5002.5
    assert clock.of(11.0) == 5001.0


def exchange(offset: ClockOffset, true_offset: float, delay: float, now: float = 100.0) -> None:
    """One message in each direction; `true_offset` is our clock minus the peer's."""
    offset.told(now, now + delay - true_offset)
    offset.heard(now - true_offset, now + delay)


def test_clocks_of_one_host_are_left_alone_however_slow_the_messages() -> None:
    offset = ClockOffset()
    for delay in (0.3, 0.05, 2.0):
        exchange(offset, 0.0, delay)
    assert offset.seconds == 0.0


@pytest.mark.parametrize("true_offset", [-3600.0, -0.2, 0.2, 3600.0])
def test_the_offset_of_another_host_is_found_within_the_delay(true_offset: float) -> None:
    offset = ClockOffset()
    for delay in (0.05, 0.002, 0.3):
        exchange(offset, true_offset, delay)
    assert offset.seconds == pytest.approx(true_offset, abs=0.002)


def test_one_direction_alone_corrects_only_what_is_impossible() -> None:
    behind, ahead = ClockOffset(), ClockOffset()
    behind.heard(100.0, 105.0)  # five seconds on the way, or another clock: nobody knows
    ahead.heard(105.0, 100.0)  # read before it was sent
    assert (behind.seconds, ahead.seconds) == (0.0, -5.0)


def test_a_clock_that_was_set_is_measured_anew() -> None:
    offset = ClockOffset()
    for _ in range(100):
        exchange(offset, 0.0, 0.001)
    exchange(offset, -50.0, 0.001)
    assert offset.seconds == pytest.approx(-50.0, abs=0.01)
    for _ in range(100):
        exchange(offset, 30.0, 0.001)
    assert offset.seconds == pytest.approx(30.0, abs=0.01)


# -- requests ---------------------------------------------------------------------------------------------------------


class Observed:
    """A `RequestLog` with its clock and meters."""

    def __init__(self) -> None:
        self.clock = Clock(1000.0)
        self.meters = Meters()
        self.settled: list[Finished] = []
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

    def total(self, metric: table.Metric, *labels: str) -> tuple[int, float]:
        histogram = self.meters.histogram(metric, *labels)
        return sum(histogram.counts), pytest.approx(histogram.total)


def test_a_done_request_is_counted_and_timed() -> None:
    seen = Observed()
    seen.begin()
    seen.text(0.5)
    seen.text(0.1)
    seen.audio(0.9)
    seen.audio(0.5)
    seen.log.ended("r", None)
    assert seen.value(table.REQUESTS, "done", "ok") == 1
    assert seen.total(table.FIRST_TEXT) == (1, 0.5)
    assert seen.total(table.FIRST_AUDIO) == (1, 1.5)
    assert seen.total(table.REQUEST_SECONDS) == (1, 2.0)
    assert seen.total(table.REALTIME_FACTOR) == (1, 1.0)  # two seconds for two seconds
    assert (seen.value(table.AUDIO_SECONDS), seen.value(table.TEXT_TOKENS)) == (2.0, 4)
    assert seen.total(table.EDGE_LATENCY, "thinker/0", "coordinator") == (2, 0.02)
    assert seen.total(table.EDGE_LATENCY, "talker/1", "coordinator") == (2, 0.04)
    timeline = seen.log.timeline("r")
    assert timeline is not None
    assert [event.name for event in timeline.events] == [
        "submitted",
        "admitted",
        "bound",
        "first_text",
        "first_audio",
        "ended",
    ]
    assert timeline.events[0].time == 999.75
    assert timeline.events[2].detail == "thinker/0 talker/1"
    (text, audio) = timeline.deliveries
    assert (text.source, text.messages, text.bytes) == ("thinker/0", 2, 2 * (2 + 8))
    assert (audio.messages, audio.bytes, audio.first_sent, audio.last_received) == (2, 192_000, 1001.48, 1002.0)
    assert [finished.timeline for finished in seen.settled] == [timeline]


def test_refused_and_failed_requests_are_counted_by_code() -> None:
    seen = Observed()
    seen.log.refused(Overloaded("full"))
    seen.begin()
    seen.log.ended("r", EngineError("no"))
    assert seen.value(table.REQUESTS, "refused", "overloaded") == 1
    assert seen.value(table.REQUESTS, "failed", "engine_error") == 1
    assert seen.total(table.REQUEST_SECONDS)[0] == 0
    assert seen.log.timeline("r").outcome == "engine_error"


def test_a_failed_request_waits_for_what_its_stages_say() -> None:
    seen = Observed()
    seen.begin()
    seen.log.ended("r", EngineError("no"))
    work = EndedWork("r", StageTimeline("thinker", 0, 1, outcome="dropped", expected=1000.0, ended=1000.5))
    seen.log.stage_ended("talker", 1, work)  # as the sender is known, not as it says
    assert seen.settled == []
    seen.clock.now += SETTLE_SECONDS
    seen.log.tick()
    seen.log.tick()
    (finished,) = seen.settled
    assert [(stage.stage, stage.replica, stage.outcome) for stage in finished.timeline.stages] == [
        ("talker", 1, "dropped")
    ]


def test_a_replayed_request_shows_both_attempts() -> None:
    seen = Observed()
    seen.begin()
    seen.log.replayed("r", EngineError("lost"), counts=True)
    seen.log.stage_ended("thinker", 0, EndedWork("r", StageTimeline("thinker", outcome="dropped", expected=1000.0)))
    seen.log.bound("r", 1, (ReplicaId("thinker", 0, 2),), ("thinker",))
    seen.stage(StageTimeline("thinker", 0, 2, attempt=1, expected=1000.0, ended=1001.0))
    seen.log.ended("r", None)
    assert seen.value(table.REPLAYS) == 1
    timeline = seen.log.timeline("r")
    assert [(stage.attempt, stage.outcome) for stage in timeline.stages] == [(0, "dropped"), (1, "done")]
    assert [event.name for event in timeline.events][-4:] == ["bound", "replayed", "bound", "ended"]


def test_a_stage_that_goes_on_keeps_its_part_and_its_clock() -> None:
    """Only the talker begins anew: what the thinker says later is of its first attempt, bound long before."""
    seen = Observed()
    for name in ("thinker/0", "talker/1"):
        seen.log.heard(name, seen.clock.now)
    seen.begin()
    seen.clock.now += 10.0
    seen.log.replayed("r", StageLost("talker/1 died"), counts=True)
    seen.log.replayed("r", StageLost("and what it needs was not kept"), counts=False)
    seen.log.bound("r", 1, (ReplicaId("thinker", 0, 1), ReplicaId("talker", 0, 1)), ("talker",))
    seen.stage(StageTimeline("thinker", 0, 1, attempt=0, expected=1000.0, ended=1012.0))
    seen.stage(StageTimeline("talker", 0, 1, attempt=1, expected=1010.0, ended=1013.0))
    seen.clock.now += 3.0
    seen.log.ended("r", None)
    assert seen.value(table.REPLAYS) == 1, "the second one follows from the first"
    timeline = seen.log.timeline("r")
    assert [(stage.stage, stage.attempt, stage.expected, stage.ended) for stage in timeline.stages] == [
        ("thinker", 0, 1000.0, 1012.0),
        ("talker", 1, 1010.0, 1013.0),
    ]
    assert [event.detail for event in timeline.events if event.name == "bound"] == [
        "thinker/0 talker/1",
        "thinker/0 talker/0",
    ]
    assert [bar.stage for bar in chart(timeline).stages] == ["thinker", "talker"]


def test_moments_of_another_clock_are_brought_to_ours() -> None:
    seen = Observed()
    for _ in range(3):
        seen.log.heard("talker/1", seen.clock.now - 500.0)  # 500 s behind
    seen.begin()
    hop = HopTimeline("thinker/0", 1, 4, first_sent=1000.1, first_received=500.2, last_sent=1000.1, last_received=500.2)
    seen.stage(StageTimeline("talker", 1, 1, expected=500.0, first_input=500.2, ended=501.0, hops=(hop,)))
    seen.log.ended("r", None)
    (stage,) = seen.log.timeline("r").stages
    assert (stage.expected, stage.first_input, stage.ended, stage.started) == (1000.0, 1000.2, 1001.0, 0.0)
    assert (stage.hops[0].first_sent, stage.hops[0].first_received) == (1000.1, 1000.2)


def test_the_callers_trace_is_kept_and_only_the_last_requests_are() -> None:
    seen = Observed()
    for index in range(KEPT + 5):
        seen.begin(f"r{index}", traceparent=TRACE)
        seen.log.ended(f"r{index}", None)
    assert seen.log.timeline("r4") is None
    assert seen.log.timeline("r5").trace_id == "a" * 32
    assert [timeline.request_id for timeline in seen.log.recent(2)] == [f"r{KEPT + 4}", f"r{KEPT + 3}"]
    assert (seen.settled[0].parent_id, seen.settled[0].sampled) == ("b" * 16, True)


def test_a_running_request_has_a_timeline_and_an_unknown_one_has_none() -> None:
    seen = Observed()
    seen.begin()
    assert seen.log.timeline("r").outcome == "running"
    assert seen.log.timeline("x") is None
    seen.log.ended("x", None)
    assert seen.value(table.REQUESTS, "done", "ok") == 0


# -- charts -----------------------------------------------------------------------------------------------------------


def drawn(request_id: str = "r", **fields: object) -> Chart:
    """Two stages, one of which failed in its second attempt; with hops."""
    seen = Observed()
    seen.begin(request_id)
    hop = HopTimeline("thinker/0", 3, 2048, 1000.3, 1000.31, 1000.8, 1000.85)
    seen.clock.now = 1001.0
    seen.stage(
        StageTimeline(
            "talker", 1, 1, 0, "done", 1000.0, 1000.31, 1000.4, 1000.5, 1000.6, 1000.9, 1000.95, 7, 8, (hop,)
        ),
        request_id,
    )
    seen.stage(StageTimeline("thinker", 0, 1, expected=1000.1, ended=1000.8, **fields), request_id)
    seen.audio(0.1, request_id)
    seen.log.ended(request_id, None)
    return chart(seen.log.timeline(request_id))


def test_phases_follow_one_another_without_a_gap() -> None:
    picture = drawn()
    assert (picture.started, picture.seconds) == (999.75, 1.35)
    thinker, talker = picture.stages  # in order of the route
    assert (thinker.stage, thinker.at, thinker.seconds) == ("thinker", 0.35, 0.7)
    assert [phase.name for phase in thinker.phases] == ["ending"], "what did not happen is left out"
    assert [phase.name for phase in talker.phases] == [
        "waiting",
        "gathering",
        "queued",
        "first output",
        "output",
        "ending",
    ]
    for before, after in zip(talker.phases, talker.phases[1:], strict=False):
        assert before.at + before.seconds == pytest.approx(after.at, abs=2e-6)
    assert sum(phase.seconds for phase in talker.phases) == pytest.approx(talker.seconds, abs=1e-5)
    first, second = picture.hops
    assert (first.source, first.target, first.messages, first.bytes) == ("thinker/0", "talker/1", 3, 2048)
    assert (first.at, first.seconds, first.first_latency) == (0.55, 0.55, 0.01)
    assert (second.source, second.target) == ("talker/1", "coordinator")


def test_a_clock_that_is_a_little_off_makes_no_phase_negative() -> None:
    (thinker, _) = drawn(first_input=999.0, started=1000.3).stages
    assert [(phase.name, phase.at, phase.seconds) for phase in thinker.phases] == [
        ("waiting", 0.35, 0.0),
        ("gathering", 0.35, 0.2),
        ("ending", 0.55, 0.5),
    ]


@pytest.mark.parametrize("request_id", ["r", 'a<b>&"c\x00\x1b', "ä" * 100])
def test_pictures_are_well_formed_whatever_the_id(request_id: str) -> None:
    picture = drawn(request_id, outcome="engine_error")
    root = ElementTree.fromstring(svg(picture).encode())
    words = " ".join(text for element in root.iter() if (text := element.text))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert all(name in words for name in ("thinker/0", "talker/1", "engine_error", "2.0 KiB", "first_audio"))
    width = float(root.get("width"))
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(box.get("x")) <= width
        assert float(box.get("x")) + float(box.get("width")) <= width + 1
    ElementTree.fromstring(page(picture).partition("\n")[2].replace('<meta charset="utf-8">', "").encode())


def test_a_hop_belongs_to_the_attempt_that_sent() -> None:
    """The thinker went on when the talker began anew, twice."""
    hops = (HopTimeline("thinker/0", 1, 4, 1000.1, 1000.2, 1000.1, 1000.2),)
    parts = [StageTimeline("thinker", 0, expected=1000.0, first_input=1000.0, last_output=1001.0, ended=1001.0)]
    for attempt, outcome in enumerate(("dropped", "dropped", "done")):
        parts.append(
            StageTimeline(
                "talker", 0, attempt + 1, attempt, outcome, expected=1000.0 + attempt, ended=1000.5 + attempt, hops=hops
            )
        )
    sent = tuple(HopTimeline(name, 1, 4, 1002.1, 1002.2, 1002.1, 1002.2) for name in ("thinker/0", "talker/0"))
    timeline = RequestTimeline(
        "r", "a" * 32, "done", 2, (TimelineEvent("bound", 1000.0, "thinker/0 talker/0"),), tuple(parts), sent
    )
    exporter = InMemorySpanExporter()
    export = SpanExport("test", exporter)
    export.export(Finished(timeline, "", True))
    export.close()
    spans = exporter.get_finished_spans()
    names = {span.context.span_id: (span.name, span.attributes.get("omni.attempt")) for span in spans}
    parents = [(span.name, names[span.parent.span_id]) for span in spans if " to " in span.name]
    assert sorted(parents) == [
        ("talker/0 to coordinator", ("talker", 2)),
        ("thinker/0 to coordinator", ("thinker", 0)),
        *[("thinker/0 to talker/0", ("thinker", 0))] * 3,
    ]


def test_an_empty_timeline_can_be_drawn() -> None:
    seen = Observed()
    seen.log.admitted("r", submit())
    empty = chart(msgspec.structs.replace(seen.log.timeline("r"), events=()))
    assert (empty.seconds, empty.stages, empty.hops) == (0.0, (), ())
    ElementTree.fromstring(svg(empty).encode())


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 µs"), (0.00064, "640 µs"), (0.0123, "12.3 ms"), (0.64, "640 ms"), (4.56, "4.56 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(44, "44 B"), (7168, "7.0 KiB"), (1.5 * 2**20, "1.5 MiB"), (3 * 2**30, "3.0 GiB")]
)
def test_sizes(n_bytes: float, text: str) -> None:
    assert size(n_bytes) == text
