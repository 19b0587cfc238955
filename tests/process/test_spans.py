"""Spans at an OpenTelemetry collector, and the metrics endpoint of the launcher."""

from __future__ import annotations

import itertools
import re
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from omni_actors.client import OmniClient
from omni_actors.errors import EngineError
from omni_actors.stage.echo import FAIL_TOKEN
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.observations import STAGES
from tests.support.waiting import until

Launch = Callable[..., EchoLauncher]


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
                    names = [
                        item.value.string_value for item in resource.resource.attributes if item.key == "service.name"
                    ]
                    collector.services.update(names)
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
