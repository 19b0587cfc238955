"""Metrics: their table, counting, snapshots, merging, Prometheus text and its endpoint; the log of requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import math
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from omni_actors.config import FlowConfig
from omni_actors.protocol.codec import encode
from omni_actors.protocol.fields import Header, Limits, ReplicaId
from omni_actors.protocol.messages import HistogramSample, Sample, Snapshot
from omni_actors.stage import session as stage_snapshot
from omni_actors.stage.actor import StageActor
from omni_actors.stage.echo import EchoEngine
from omni_actors.stage.meter import KEPT_TIMELINES, StageMeter
from omni_actors.stage.session import process_values
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.collector import TelemetryCollector
from omni_actors.telemetry.endpoint import CONNECTIONS, MetricsEndpoint, render
from omni_actors.telemetry.metrics import TABLE, Kind, Meters, edge_metrics
from omni_actors.telemetry.request_log import KEPT, Playback, RequestLog
from omni_actors.transport.link import PeerLinks, Traffic, Window
from omni_actors.transport.sockets import Sockets
from tests.support.builders import pipeline, submit
from tests.support.clock import Clock
from tests.support.paths import REPOSITORY
from tests.support.requests import ask, bring_back, lose, ready
from tests.support.waiting import until

LABELS = ("talker", "0")


def parsed(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values in order of their names -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in sorted(sample.labels))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


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


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((REPOSITORY / "docs" / "grafana.json").read_text())
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


def snapshot(tokens: float = 0, steps: tuple[int, ...] | None = None, held: float = 0) -> Snapshot:
    counts = steps or (0,) * (len(table.STEP_SECONDS.bounds) + 1)
    return Snapshot(
        samples=(Sample(table.OUTPUT_TOKENS.name, LABELS, tokens), Sample(table.STAGE_HELD.name, LABELS, held)),
        histograms=(HistogramSample(table.STEP_SECONDS.name, LABELS, counts, float(sum(counts))),),
    )


def values_of(collector: TelemetryCollector) -> dict[Any, float]:
    """What a collector has gathered, without the coordinator's own metrics."""
    return collector.gather(ready(), unlinked(), {}, {}).values


TOKENS, HELD = (table.OUTPUT_TOKENS.name, LABELS), (table.STAGE_HELD.name, LABELS)


def test_counters_go_on_after_a_restart_and_gauges_do_not() -> None:
    collector = TelemetryCollector()
    steps = (2,) + (0,) * len(table.STEP_SECONDS.bounds)
    for tokens in (5, 7):  # the same process, later
        collector.take_snapshot("talker", 0, snapshot(tokens, steps, held=3))
    for _ in range(2):
        assert (values_of(collector)[TOKENS], values_of(collector)[HELD]) == (7, 3)
    for _ in range(2):
        collector.process_ended("talker/0")
        assert values_of(collector)[TOKENS] == 7
        assert HELD not in values_of(collector)
    collector.take_snapshot("talker", 0, snapshot(1, steps, held=1))
    assert (values_of(collector)[TOKENS], values_of(collector)[HELD]) == (8, 1)
    gathered = collector.gather(ready(), unlinked(), {}, {})
    assert gathered.histograms[(table.STEP_SECONDS.name, LABELS)].counts[0] == 4


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
def test_a_snapshot_that_does_not_fit_the_table_is_counted_and_changes_nothing(wrong: Snapshot) -> None:
    collector = TelemetryCollector()
    collector.take_snapshot("talker", 0, snapshot(5))
    collector.take_snapshot("talker", 0, wrong)
    assert values_of(collector)[TOKENS] == 5
    assert values_of(collector)[(table.REJECTED.name, (*table.COORDINATOR, "control", "wrong_snapshot"))] == 1


def test_http_servers_report_their_own_metrics_and_no_others() -> None:
    collector = TelemetryCollector()
    sessions, answers = (table.REALTIME_SESSIONS.name, ()), (table.REALTIME_RESPONSES.name, ("completed",))
    for client, count in ((b"a", 2.0), (b"b", 3.0)):
        own = (Sample(*sessions, count), Sample(*answers, 10 * count))
        collector.take_clients(client, Snapshot(samples=own))
    collector.take_clients(b"c", Snapshot(samples=(Sample(table.OUTPUT_TOKENS.name, LABELS, 1.0),)))
    collector.client_gone(b"b")
    value = values_of(collector)
    assert (value[sessions], value[answers]) == (2, 50)
    assert TOKENS not in value
    assert value[(table.REJECTED.name, (*table.COORDINATOR, "client", "wrong_snapshot"))] == 1


def test_the_coordinators_own_metrics_are_those_of_requests_and_replicas() -> None:
    state = ready(max_in_flight=1)
    for name in "abc":
        ask(state, name)
    lose(state, "code2wav")
    bring_back(state, "code2wav")
    value = TelemetryCollector().gather(state, unlinked(), {"client": {"magic": 6}}, {"late": 7}).values
    assert value[(table.REJECTED.name, (*table.COORDINATOR, "client", "magic"))] == 6
    assert value[(table.DROPPED.name, (*table.COORDINATOR, "late"))] == 7
    assert value[(table.ROUTED.name, ("load",))] == 5
    assert value[(table.IN_FLIGHT.name, ())] == 1
    assert value[(table.QUEUED.name, ())] == 2
    assert value[(table.RETAINED.name, ())] == state.retained.used > 0
    assert (value[(table.READY.name, LABELS)], value[(table.BOUND.name, LABELS)]) == (1, 1)
    restarts = {labels[0]: count for (name, labels), count in value.items() if name == table.RESTARTS.name}
    assert restarts == {"prompt": 0, "thinker": 0, "talker": 0, "code2wav": 1}, "the first start is no restart"


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
    assert [buckets[0], buckets[-2], buckets[-1]] == [1, 1, 2]
    assert found["omni_stage_step_seconds_count"] == {("0", "talker"): 2}


def test_edges_that_are_gone_keep_their_counts_only() -> None:
    meters, peers, peer = Meters(), unlinked(), ReplicaId("b", 0, 5)
    peers.traffic["b/0"] = Traffic(3, 300, 4000)
    peers.open(peer, "inproc://nobody").window = Window(10, 1000, messages_out=1)
    edge_metrics(meters, "a/0", peers)
    assert meters.values[(table.EDGE_CREDIT.name, ("a/0", "b/0"))] == 9
    peers.close(peer)
    peers.traffic["b/0"] = Traffic(4, 400, 4000)
    edge_metrics(meters, "a/0", peers)
    assert meters.values == {
        (table.EDGE_MESSAGES.name, ("a/0", "b/0")): 4,
        (table.EDGE_BYTES.name, ("a/0", "b/0")): 400,
        (table.EDGE_SHARED.name, ("a/0", "b/0")): 4000,
    }


def unlinked() -> PeerLinks:
    """Links to nobody yet."""
    return PeerLinks(Sockets(), FlowConfig())


def next_snapshot(meter: StageMeter, limit: int) -> Snapshot:
    """The next snapshot of a stage that counts with `meter`."""
    engine = EchoEngine(pipeline().stage("talker"))
    config = pipeline()
    actor = StageActor(config, config.stage("talker"), ReplicaId("talker", 0, 5), engine, None, Clock(1000.0), meter)
    return stage_snapshot.snapshot(meter, actor, engine, process_values(engine), {}, {}, limit)


def end_many(meter: StageMeter, count: int) -> list[str]:
    """Let `count` requests fail; returns the names of the last ones, whose timelines the meter keeps."""
    names = [f"request-{index:04}" for index in range(count)]
    for name in names:
        timings = meter.opened(0, has_input=False)
        meter.received(timings, "thinker/0", 999.0, 100)
        meter.failed(name, timings, "engine_error")
    return names[-KEPT_TIMELINES:]


def test_a_snapshot_fits_its_message_and_the_next_ones_bring_the_remaining_timelines() -> None:
    meter = StageMeter(ReplicaId("talker", 0, 5))
    end_many(meter, 1)
    metrics_alone = next_snapshot(meter, 0)  # the metrics are sent even if there is no room for a timeline
    assert metrics_alone.samples
    assert not metrics_alone.ended
    limits = Limits(body_bytes=len(encode(Header(""), metrics_alone)[2]) + 12_000)
    names = end_many(meter, KEPT_TIMELINES + 10)
    seen: list[str] = []
    for _ in range(KEPT_TIMELINES):
        one = next_snapshot(meter, limits.body_bytes)
        size = len(encode(Header(""), one, limits=limits)[2])  # which raises if it does not fit
        seen += [work.request_id for work in one.ended]
        if len(seen) == len(names):
            break
        assert one.ended
        assert size > limits.body_bytes - 300, "as many as fit"
    assert seen == names
    assert next_snapshot(meter, 1 << 20).ended == ()


PIECES = st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.01, 3.0)), min_size=1, max_size=20)


def played(pieces: list[tuple[float, float]], begin: float | None) -> list[float]:
    """The gaps that a listener hears who presses play at `begin`, or when the first piece comes."""
    gaps, position = [], pieces[0][0] if begin is None else begin
    for came, seconds in pieces:
        gaps.append(max(0.0, came - position))
        position = max(position, came) + seconds
    return gaps


@given(PIECES)
def test_both_listeners_hear_what_is_said_of_them(pieces: list[tuple[float, float]]) -> None:
    moments = itertools.accumulate((wait for wait, _ in pieces), initial=100.0)
    timed = [(came, seconds) for came, (_, seconds) in zip(itertools.islice(moments, 1, None), pieces, strict=True)]
    playback = Playback()
    for came, seconds in timed:
        playback.add(came, seconds)
    gaps = played(timed, None)
    assert playback.longest_gap == pytest.approx(max(gaps), abs=1e-6)
    assert playback.gaps == pytest.approx(sum(gaps), abs=1e-6)
    assert sum(played(timed, playback.smooth_start)) == pytest.approx(0.0, abs=1e-6)
    if sum(gaps) > 0.002:
        assert sum(played(timed, playback.smooth_start - 0.001)) > 0.0, "no earlier moment would do"


def test_only_the_last_requests_are_kept() -> None:
    log = RequestLog(Meters(), Clock(1000.0), lambda _: None)
    for index in range(KEPT + 5):
        log.admitted(Header("submit", f"r{index}"), submit())
        log.ended(f"r{index}", None)
    assert log.timeline("r4") is None
    assert log.timeline("r5") is not None
    assert [timeline.request_id for timeline in log.recent(2)] == [f"r{KEPT + 4}", f"r{KEPT + 3}"]


TEXT = "# TYPE omni_things gauge\nomni_things 3.0\n"


async def fetch() -> str:
    return TEXT


@pytest.fixture(params=["127.0.0.1", "::1", "0.0.0.0"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[MetricsEndpoint]:
    """Listens on the address of the parameter."""
    made: list[MetricsEndpoint] = []
    ready, done = threading.Event(), threading.Event()

    async def run() -> None:
        made.append(MetricsEndpoint(request.param, 0, fetch))
        ready.set()
        await asyncio.to_thread(done.wait, 60)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(10)
    yield made[0]
    made[0].close()
    done.set()
    thread.join()


def test_silent_connections_make_room_for_scrapes(endpoint: MetricsEndpoint) -> None:
    url = httpx.URL(endpoint.url)
    before = threading.active_count()
    with contextlib.ExitStack() as closing:
        connect = functools.partial(socket.create_connection, (url.host, url.port), timeout=60)
        silent = [closing.enter_context(connect()) for _ in range(5 * CONNECTIONS)]
        for half in silent[::2]:
            half.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert "omni_things 3.0" in httpx.get(url, timeout=60).text
        for made in silent[: 4 * CONNECTIONS]:
            assert made.recv(1) == b""
        until(
            lambda: threading.active_count() <= before + CONNECTIONS + 1, what="no thread is left of those that ended"
        )


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "[", ""])
def test_on_loopback_a_page_of_another_name_reads_nothing(endpoint: MetricsEndpoint, host: str) -> None:
    answer = httpx.get(endpoint.url, headers={"host": host})
    expected = 200 if "0.0.0.0" in endpoint.url else 403
    assert answer.status_code == expected
    assert ("omni_things" in answer.text) == (expected == 200)
