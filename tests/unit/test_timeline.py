"""Forms of a timeline: phases, JSON, spans, and what the terminal prints."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from omni_actors.protocol.messages import RequestTimeline, StageTimeline, TimelineEvent, TransferTimeline
from omni_actors.telemetry.otlp import OtlpExporter
from omni_actors.telemetry.request_log import ObservedRequest
from omni_actors.telemetry.timeline import as_json
from tests.support.request_log import Observed


def recorded(request_id: str = "r", **thinker: object) -> RequestTimeline:
    """Two stages with a transfer between them; `thinker` are fields of the first one's timeline."""
    seen = Observed()
    seen.begin(request_id)
    transfer = TransferTimeline("thinker/0", 3, 2048, 1000.3, 1000.31, 1000.8, 1000.85)
    seen.clock.now = 1001.0
    talker = StageTimeline(
        stage="talker",
        replica=1,
        epoch=1,
        expected=1000.0,
        first_input=1000.31,
        started=1000.4,
        first_step=1000.5,
        first_output=1000.6,
        last_output=1000.9,
        ended=1000.95,
        input_tokens=7,
        output_tokens=8,
        transfers=[transfer],
    )
    seen.stage(talker, request_id)
    seen.stage(StageTimeline("thinker", 0, 1, expected=1000.1, ended=1000.8, **thinker), request_id)
    seen.audio(0.1, request_id)
    seen.log.ended(request_id, None)
    return seen.log.timeline(request_id)


def test_phases_follow_one_another_without_a_gap() -> None:
    shown = as_json(recorded())
    assert shown["started"] == 999.75
    assert shown["seconds"] == 1.35
    thinker, talker = shown["stages"]  # in order of the route
    assert thinker["stage"] == "thinker"
    assert thinker["at"] == 0.35
    assert thinker["seconds"] == 0.7
    assert [phase["name"] for phase in thinker["phases"]] == ["ending"], "what did not happen is left out"
    names = ["waiting", "gathering", "queued", "first output", "output", "ending"]
    assert [phase["name"] for phase in talker["phases"]] == names
    for before, after in itertools.pairwise(talker["phases"]):
        assert before["at"] + before["seconds"] == pytest.approx(after["at"], abs=2e-6)
    assert sum(phase["seconds"] for phase in talker["phases"]) == pytest.approx(talker["seconds"], abs=1e-5)


def test_transfers_go_from_the_first_message_sent_to_the_last_one_received() -> None:
    first, second = as_json(recorded())["transfers"]
    assert first == {
        "source": "thinker/0",
        "target": "talker/1",
        "attempt": 0,
        "at": 0.55,
        "seconds": 0.55,
        "messages": 3,
        "bytes": 2048,
        "first_latency": 0.01,
    }
    assert second["source"] == "talker/1"
    assert second["target"] == "coordinator"


def test_a_transfer_belongs_to_the_attempt_that_sent() -> None:
    """The thinker went on when the talker started again, twice."""
    transfers = [TransferTimeline("thinker/0", 1, 4, 1000.1, 1000.2, 1000.1, 1000.2)]
    parts = [StageTimeline("thinker", 0, expected=1000.0, first_input=1000.0, last_output=1001.0, ended=1001.0)]
    for attempt, outcome in enumerate(("dropped", "dropped", "done")):
        begin = 1000.0 + attempt
        part = StageTimeline("talker", 0, attempt + 1, attempt, outcome, expected=begin, ended=begin + 0.5)
        parts.append(msgspec.structs.replace(part, transfers=transfers))
    sent = [TransferTimeline(name, 1, 4, 1002.1, 1002.2, 1002.1, 1002.2) for name in ("thinker/0", "talker/0")]
    events = [TimelineEvent("bound", 1000.0, "thinker/0 talker/0")]
    timeline = RequestTimeline("r", "a" * 32, "done", 2, events, parts, sent)
    collected = InMemorySpanExporter()
    exporter = OtlpExporter("test", collected)
    exporter.export(ObservedRequest(timeline, "", True, 0.0))
    exporter.close()
    spans = collected.get_finished_spans()
    names = {span.context.span_id: (span.name, span.attributes.get("omni.attempt")) for span in spans}
    parents = [(span.name, names[span.parent.span_id]) for span in spans if " to " in span.name]
    assert sorted(parents) == [
        ("talker/0 to coordinator", ("talker", 2)),
        ("thinker/0 to coordinator", ("thinker", 0)),
        *[("thinker/0 to talker/0", ("thinker", 0))] * 3,
    ]
