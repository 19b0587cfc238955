"""Metrics and timelines over HTTP, and the server's log."""

from __future__ import annotations

import itertools

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_actors.telemetry.metrics import TABLE
from tests.support.observations import LOG_LINE
from tests.support.servers import HttpPipeline

TRACE_ID = "f" * 32
MARKER = "Zauberwort"
PARTS_OF_STAGE = {"stage", "replica", "attempt", "outcome", "at", "seconds", "phases", "input_tokens", "output_tokens"}
PARTS_OF_TRANSFER = {"source", "target", "attempt", "at", "seconds", "messages", "bytes", "first_latency"}
SPOKEN = {
    "model": "echo",
    "messages": [{"role": "user", "content": MARKER}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "Ethan", "format": "pcm16"},
}


@pytest.fixture
def request_id(echo: HttpPipeline) -> str:
    """The id of a spoken answer whose request had a trace context."""
    headers = {"traceparent": f"00-{TRACE_ID}-{'e' * 16}-01"}
    answer = httpx.post(f"{echo.url}/v1/chat/completions", json=SPOKEN, headers=headers)
    assert answer.status_code == 200
    return answer.headers["x-request-id"]


def test_metrics_are_prometheus_text(echo: HttpPipeline, request_id: str) -> None:
    answer = httpx.get(f"{echo.url}/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name for family in text_string_to_metric_families(answer.text)}
    assert families == {name.removesuffix("_total") for name in TABLE}
    assert 'omni_requests_total{code="ok",outcome="done"}' in answer.text


def test_the_timeline_of_a_response(echo: HttpPipeline, request_id: str) -> None:
    """The object that docs/observability.md describes."""
    shown = httpx.get(f"{echo.url}/v1/requests/{request_id}/timeline").json()
    assert set(shown) == {"id", "trace_id", "outcome", "attempt", "started", "seconds", "events", "stages", "transfers"}
    assert shown["id"] == request_id
    assert shown["trace_id"] == TRACE_ID
    assert shown["outcome"] == "done"
    assert shown["attempt"] == 0
    names = ["submitted", "admitted", "bound", "first_text", "first_audio", "ended"]
    assert [event["name"] for event in shown["events"]] == names
    assert [stage["stage"] for stage in shown["stages"]] == ["prompt", "thinker", "talker", "code2wav"]
    for stage in shown["stages"]:
        assert set(stage) == PARTS_OF_STAGE
        assert 0 <= stage["at"] <= stage["at"] + stage["seconds"] <= shown["seconds"] + 1e-5
        assert all(set(phase) == {"name", "at", "seconds"} for phase in stage["phases"])
        for before, after in itertools.pairwise(stage["phases"]):
            assert before["at"] + before["seconds"] == pytest.approx(after["at"], abs=2e-6)
        assert sum(phase["seconds"] for phase in stage["phases"]) == pytest.approx(stage["seconds"], abs=1e-5)
    assert {(transfer["source"], transfer["target"]) for transfer in shown["transfers"]} == {
        ("prompt/0", "thinker/0"),
        ("thinker/0", "talker/0"),
        ("talker/0", "code2wav/0"),
        ("thinker/0", "coordinator"),
        ("code2wav/0", "coordinator"),
    }
    assert set(shown["transfers"][0]) == PARTS_OF_TRANSFER
    recent = httpx.get(f"{echo.url}/v1/requests", params={"limit": 1}).json()
    assert recent == {"object": "list", "data": [shown]}


def test_unknown_requests(echo: HttpPipeline) -> None:
    answer = httpx.get(f"{echo.url}/v1/requests/unknown/timeline")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    assert httpx.get(f"{echo.url}/v1/requests", params={"limit": 0}).status_code == 400


def test_logs_hold_the_id_and_no_content(echo: HttpPipeline, request_id: str) -> None:
    wrong = {**SPOKEN, "audio": {"voice": MARKER, "format": "pcm16"}}
    assert httpx.post(f"{echo.url}/v1/chat/completions", json=wrong).status_code == 400
    logs = {path.name: path.read_text() for path in (echo.run_dir / "logs").rglob("*.log")}
    assert not [name for name, text in logs.items() if MARKER in text]
    *lines, _ = logs["http.log"].split("\n")  # the last line may not be whole yet
    assert not [line for line in lines if not LOG_LINE.match(line)]
    assert [line for line in lines if f" request={request_id} " in line and "POST /v1/chat/completions 200" in line]
