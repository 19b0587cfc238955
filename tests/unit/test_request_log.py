"""What the coordinator counts and keeps of requests: outcomes, times, timelines."""

from __future__ import annotations

from omni_actors.errors import EngineError, Overloaded, StageLost
from omni_actors.protocol.fields import ReplicaId
from omni_actors.protocol.messages import StageTimeline
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.request_log import KEPT
from omni_actors.telemetry.timeline import stages
from tests.support.request_log import Observed

TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def test_a_done_request_is_counted_and_timed() -> None:
    seen = Observed()
    seen.begin()
    seen.text(0.5)
    seen.text(0.1)
    seen.audio(0.9)
    seen.audio(0.5)
    seen.log.ended("r", None)
    assert seen.value(table.REQUESTS, "done", "ok") == 1
    assert seen.observations(table.FIRST_TEXT) == (1, 0.5)
    assert seen.observations(table.FIRST_AUDIO) == (1, 1.5)
    assert seen.observations(table.REQUEST_SECONDS) == (1, 2.0)
    assert seen.observations(table.REALTIME_FACTOR) == (1, 1.0)  # two seconds for two seconds
    assert seen.value(table.AUDIO_SECONDS) == 2.0
    assert seen.value(table.TEXT_TOKENS) == 4
    assert seen.observations(table.EDGE_LATENCY, "thinker/0", "coordinator") == (2, 0.02)
    assert seen.observations(table.EDGE_LATENCY, "talker/1", "coordinator") == (2, 0.04)
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
    text, audio = timeline.deliveries
    assert text.source == "thinker/0"
    assert text.messages == 2
    assert text.bytes == 2 * (2 + 8)
    assert audio.messages == 2
    assert audio.bytes == 192_000
    assert audio.first_sent == 1001.48
    assert audio.last_received == 1002.0
    assert [finished.timeline for finished in seen.settled] == [timeline]


def test_refused_and_failed_requests_are_counted_by_code() -> None:
    seen = Observed()
    seen.log.refused(Overloaded("full"))
    seen.begin()
    seen.log.ended("r", EngineError("no"))
    assert seen.value(table.REQUESTS, "refused", "overloaded") == 1
    assert seen.value(table.REQUESTS, "failed", "engine_error") == 1
    assert seen.observations(table.REQUEST_SECONDS)[0] == 0
    assert seen.log.timeline("r").outcome == "engine_error"


def test_a_stage_that_goes_on_keeps_its_attempt() -> None:
    """Only the talker starts again: what the thinker reports later belongs to its first attempt, bound long before."""
    seen = Observed()
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
    assert [stage.stage for stage in stages(timeline)] == ["thinker", "talker"]


def test_the_callers_trace_is_kept_and_only_the_last_requests_are() -> None:
    seen = Observed()
    for index in range(KEPT + 5):
        seen.begin(f"r{index}", traceparent=TRACE)
        seen.log.ended(f"r{index}", None)
    assert seen.log.timeline("r4") is None
    assert seen.log.timeline("r5").trace_id == "a" * 32
    assert [timeline.request_id for timeline in seen.log.recent(2)] == [f"r{KEPT + 4}", f"r{KEPT + 3}"]
    assert seen.settled[0].parent_id == "b" * 16
    assert seen.settled[0].sampled
