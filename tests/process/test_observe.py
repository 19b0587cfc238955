"""Metrics, timelines, spans at a collector, live view and logs of running pipelines of echo stages."""

from __future__ import annotations

import itertools
import re
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from omni_actors.cli import top, trace
from omni_actors.cli.top import Scrape
from omni_actors.client import AsyncOmniClient, OmniClient
from omni_actors.errors import EngineError, InvalidRequest, OmniError
from omni_actors.stage.echo import FAIL_TOKEN
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.timeline import stages
from tests.support.builders import chain
from tests.support.load import disturbed_chain
from tests.support.observations import (
    LOG_LINE,
    STAGES,
    assert_causal,
    event_names,
    grown,
    reported,
    scrape_until,
    settled,
)
from tests.support.waiting import eventually, until


@pytest.fixture
async def client(echo):
    async with AsyncOmniClient(echo.endpoint) as client:
        yield client


async def test_every_stage_and_edge_counts_its_share_of_a_request(client):
    before = await settled(client)
    prompt = [65] * 1000
    for _ in range(2):
        await client.generate({"prompt_token_ids": prompt}, params={"prompt": {"max_tokens": 10}})
    with pytest.raises(EngineError):
        await client.generate({"prompt_token_ids": [65, FAIL_TOKEN]}, modalities=["text"])

    def all_reported(now: Scrape) -> bool:
        return reported(before, now, 2) and grown(before, now, table.STAGE_REQUESTS, "prompt", "0", "engine_error") == 1

    now = await scrape_until(client, all_reported)
    assert grown(before, now, table.REQUESTS, "done", "ok") == 2
    assert grown(before, now, table.REQUESTS, "failed", "engine_error") == 1
    assert grown(before, now, table.TEXT_TOKENS) == 20
    assert grown(before, now, table.AUDIO_SECONDS) == pytest.approx(20 * 480 / 24_000)
    for metric in (table.FIRST_TEXT, table.FIRST_AUDIO, table.REQUEST_SECONDS, table.REALTIME_FACTOR):
        assert grown(before, now, metric, suffix="_count") == 2, metric.name
        assert grown(before, now, metric, suffix="_sum") > 0, metric.name
    for stage in STAGES:
        assert grown(before, now, table.STAGE_REQUESTS, stage, "0", "done") == 2, stage
        assert grown(before, now, table.OUTPUT_TOKENS, stage, "0") in (20, 21) if stage != "code2wav" else True
        assert 10 <= grown(before, now, table.STEP_SECONDS, stage, "0", suffix="_count") <= 30, stage
        # A step sleeps for 2 ms.
        assert grown(before, now, table.STEP_SECONDS, stage, "0", suffix="_sum") >= 0.002 * 10, stage
        assert grown(before, now, table.QUEUE_SECONDS, stage, "0", suffix="_count") >= 2, stage
        assert now.value(table.READY, stage, "0") == 1
        assert now.value(table.RESIDENT, stage, "0") > 1 << 20
    assert grown(before, now, table.STAGE_REQUESTS, "prompt", "0", "engine_error") == 1
    for source, target in itertools.pairwise(STAGES):
        edge = (f"{source}/0", f"{target}/0")
        assert 20 <= grown(before, now, table.EDGE_MESSAGES, *edge) <= 40, edge
        assert grown(before, now, table.EDGE_BYTES, *edge) >= 20 * (5 + 16), "rows, each with its magic"
        assert grown(before, now, table.EDGE_LATENCY, *edge, suffix="_count") in (20, 21), edge
        assert 0 < now.value(table.EDGE_CREDIT, *edge) <= 1024
    # The prompt's own bytes, twice, and little else.
    assert 8000 < grown(before, now, table.EDGE_BYTES, "coordinator", "prompt/0") < 9500
    assert grown(before, now, table.EDGE_BYTES, "coordinator", "clients") > 20 * 480 * 4
    assert grown(before, now, table.EDGE_LATENCY, "code2wav/0", "coordinator", suffix="_count") == 20


def counters(client: OmniClient) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in client.metrics().splitlines() if not line.startswith("#")]
    rising = re.compile(r"\w+(_total|_count|_sum|_bucket)\b")
    return {name: float(value) for name, _, value in lines if rising.match(name)}


async def test_a_timeline_has_every_stage_in_causal_order(client):
    stream = await client.submit("hello", traceparent="00-" + "c" * 32 + "-" + "d" * 16 + "-01")
    await stream.result()
    timeline = await client.timeline(stream.request_id)
    assert timeline.outcome == "done"
    assert timeline.trace_id == "c" * 32
    assert sorted(stage.stage for stage in timeline.stages) == sorted(STAGES)
    assert_causal(timeline)
    for stage in timeline.stages:
        assert stage.input_tokens == 5
        assert stage.output_tokens == 5
        sources = [transfer.source for transfer in stage.transfers]
        assert sources == ([f"{STAGES[STAGES.index(stage.stage) - 1]}/0"] if stage.stage != "prompt" else [])
        for transfer in stage.transfers:
            assert transfer.messages == 5
            assert transfer.bytes == 5 * (4 + 16), "token id and row of 8 bf16"
    assert [transfer.source for transfer in timeline.deliveries] == ["thinker/0", "code2wav/0"]
    assert [stage.stage for stage in stages(timeline)] == list(STAGES)


async def test_the_timeline_of_a_failed_request_shows_where_it_failed_and_unknown_ones_have_none(client):
    with pytest.raises(InvalidRequest, match="no timeline of request 'x'"):
        await client.timeline("x")
    stream = await client.submit({"prompt_token_ids": [65] * 5 + [FAIL_TOKEN]})
    with pytest.raises(EngineError):
        await stream.result()

    async def whole():
        timeline = await client.timeline(stream.request_id)
        return timeline if len(timeline.stages) == len(STAGES) else None

    timeline = await eventually(whole, 5, "what all stages report")
    assert timeline.outcome == "engine_error"
    outcomes = {stage.stage: stage.outcome for stage in timeline.stages}
    assert outcomes == {**dict.fromkeys(STAGES, "dropped"), "prompt": "engine_error"}


def test_after_a_partial_replay_nothing_is_counted_twice_and_the_timeline_has_both_attempts(launch, short_path):
    """The vocoder dies halfway: the stages before it go on, and the talker sends again what it had sent.

    No counter falls, although the vocoder that is started again begins at zero; and no log has any content.
    """
    text = "abcdefghijklmnopqrstuvwxyz0123456789"
    launcher = launch(disturbed_chain(step_seconds=0.03), "--run-dir", str(short_path / "run")).wait_ready()
    made = 'omni_stage_output_tokens_total{replica="0",stage="%s"}'
    ended = 'omni_stage_requests_total{outcome="done",replica="0",stage="%s"}'
    seen: list[dict[str, float]] = []

    def all_have_ended(count: int) -> bool:
        seen.append(counters(client))
        return all(seen[-1].get(ended % stage) == count for stage in STAGES)

    with OmniClient(launcher.endpoint) as client:
        client.generate(text)
        until(lambda: all_have_ended(1), 5, "the counts of the first answer")
        stream = client.submit(text)
        until(lambda: "first_audio" in event_names(client.timeline(stream.request_id)), 10, "the first audio")
        psutil.Process(launcher.pid_of("code2wav")).kill()
        assert stream.result().text == text
        timeline = client.timeline(stream.request_id)
        until(lambda: all_have_ended(2), 5, "the counts of the second one")
        tokens = [*text.encode(), FAIL_TOKEN]
        failing = client.submit({"prompt_token_ids": tokens})
        with pytest.raises(EngineError):
            failing.result()
        with pytest.raises(OmniError):
            client.generate(text, voice=text)
    for earlier, now in itertools.pairwise(seen):
        assert not {name for name, value in earlier.items() if now.get(name, 0) < value}, "no counter falls"
    assert now['omni_replica_restarts_total{replica="0",stage="code2wav"}'] == 1
    assert now['omni_replica_restarts_total{replica="0",stage="thinker"}'] == 0
    assert timeline.outcome == "done"
    assert timeline.attempt == 1
    assert now["omni_replays_total"] == 1
    lived = [(stage.stage, stage.attempt, stage.outcome) for stage in timeline.stages if stage.stage != "code2wav"]
    assert sorted(lived) == sorted((stage, 0, "done") for stage in STAGES[:3])
    (vocoder,) = [stage for stage in timeline.stages if stage.stage == "code2wav"]
    assert vocoder.attempt == 1
    assert vocoder.outcome == "done"
    assert vocoder.transfers[0].messages == len(text)
    assert event_names(timeline).count("bound") == 2
    bound = [event.time for event in timeline.events if event.name == "bound"]
    assert bound[0] <= min(stage.expected for stage in timeline.stages) < bound[1] <= vocoder.expected
    assert bound[1] <= vocoder.transfers[0].first_sent <= vocoder.transfers[0].first_received, "when it was sent again"
    talker = next(stage for stage in timeline.stages if stage.stage == "talker")
    assert talker.first_output < bound[1]
    assert [stage.stage for stage in stages(timeline)] == list(STAGES)
    for stage in STAGES[:3]:
        assert now[made % stage] == 2 * len(text), stage
    edge = 'omni_edge_messages_total{source="talker/0",target="code2wav/0"}'
    assert 2 * len(text) < now[edge] <= 3 * len(text), "the edge has carried some of it twice"
    assert launcher.output.count("code2wav/0 ready") == 2, "it has printed the end of a log"
    assert launcher.end() == 0
    logs = {path.name: path.read_text() for path in (short_path / "run" / "logs").rglob("*.log")}
    assert len(logs) == len(STAGES)
    for name, log in {**logs, "launcher": launcher.output}.items():
        assert text not in log, name
        assert str(tokens)[1:-1] not in log, name
    for name, log in logs.items():
        assert log, name
        assert not [line for line in log.splitlines() if not LOG_LINE.match(line)], name
    (failed,) = [line for line in "".join(logs.values()).splitlines() if "request failed" in line]
    assert f" request={failing.request_id} " in failed
    assert any(" stage=code2wav/0 " in line for line in launcher.output.splitlines() if "ended: " in line)


def test_trace_shows_the_last_request(echo, capsys):
    with OmniClient(echo.endpoint) as client:
        stream = client.submit("hello")
        stream.result()
    assert trace.main(["last", "--endpoint", echo.endpoint]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in (stream.request_id, "code2wav/0", "thinker/0 → talker/0", "first_audio"))
    assert trace.main(["unknown", "--endpoint", echo.endpoint]) == 1
    assert "no timeline of request 'unknown'" in capsys.readouterr().err


def test_top_shows_every_replica_once(echo, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OMNI_ACTORS_ENDPOINT", echo.endpoint)
    with OmniClient(echo.endpoint) as client:
        stream = client.submit({"prompt_token_ids": [65] * 1000})
        assert top.main(["--once", "--interval", "0.6"]) == 0
        stream.abort()
        replicas = client.describe().stages
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    for status in replicas:
        (line,) = [line for line in lines if line[0] == f"{status.stage}/{status.replica}" and line[1] != "→"]
        assert line[1:3] == ["ready", str(status.pid)]
    assert "1 of 256 requests in flight" in shown
    prompt = next(line for line in lines if line[0] == "prompt/0")
    assert float(prompt[5]) > 10, f"tokens a second: {prompt}"
    assert "thinker/0 → talker/0" in shown


class Collector:
    """An OpenTelemetry collector for spans over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in request.resource_spans:
                    described = resource.resource.attributes
                    collector.services |= {one.value.string_value for one in described if one.key == "service.name"}
                    for scope in resource.scope_spans:
                        collector.spans.extend(scope.spans)
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def of(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id.hex() == trace_id]


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def attributes(span: Span) -> dict[str, str | int]:
    return {item.key: item.value.string_value or item.value.int_value for item in span.attributes}


def test_spans_reach_a_collector_with_the_callers_trace(launch, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    data = chain()
    data["coordinator"] = {"heartbeat_interval": 0.1}
    launcher = launch(data, "--metrics", "127.0.0.1:0").wait_ready()
    ours, unsampled, failing = "a" * 32, "b" * 32, "c" * 32
    parent = "d" * 16
    with OmniClient(launcher.endpoint) as client:
        client.generate("hello", traceparent=f"00-{ours}-{parent}-01")
        client.generate("hello", traceparent=f"00-{unsampled}-{parent}-00")
        with pytest.raises(EngineError):
            client.generate({"prompt_token_ids": [FAIL_TOKEN]}, traceparent=f"00-{failing}-{parent}-01")
        alone = client.submit("hello")
        alone.result()
        own_trace = client.timeline(alone.request_id).trace_id
    until(lambda: len(collector.of(own_trace)) == 10, 5, lambda: f"spans: {[span.name for span in collector.spans]}")
    assert collector.services == {"omni_actors/test"}

    spans = {span.name: span for span in collector.of(ours)}
    root = spans["request"]
    assert root.parent_span_id.hex() == parent
    assert [event.name for event in root.events][-1] == "ended"
    transfers = {f"{source}/0 to {target}/0": source for source, target in itertools.pairwise(STAGES)}
    transfers |= {"thinker/0 to coordinator": "thinker", "code2wav/0 to coordinator": "code2wav"}
    assert set(spans) == {"request", *STAGES, *transfers}
    for stage in STAGES:
        assert spans[stage].parent_span_id == root.span_id
        assert attributes(spans[stage])["omni.output_tokens"] == 5
    for name, source in transfers.items():
        assert spans[name].parent_span_id == spans[source].span_id, name
        assert attributes(spans[name])["omni.messages"] == 5
    for span in spans.values():
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano + 1000

    assert not collector.of(unsampled)
    (root,) = [span for span in collector.of(own_trace) if span.name == "request"]
    assert not root.parent_span_id
    until(lambda: collector.of(failing), 6, "the failed request's spans")
    failed = {span.name: span for span in collector.of(failing)}
    assert failed["request"].status.code == failed["prompt"].status.code == Status.STATUS_CODE_ERROR
    assert failed["prompt"].status.message == "engine_error"

    url = re.search(r"metrics on (\S+)", launcher.output)[1]
    with urllib.request.urlopen(url, timeout=5) as answer:
        text = answer.read().decode()
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert re.search(r'^omni_requests_total\{code="ok",outcome="done"\} 3.0$', text, re.MULTILINE)
