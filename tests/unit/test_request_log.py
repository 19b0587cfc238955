"""How many requests the coordinator remembers."""

from __future__ import annotations

from omni_actors.telemetry.metrics import Meters
from omni_actors.telemetry.request_log import KEPT, RequestLog
from tests.support.builders import submit
from tests.support.clock import Clock


def test_only_the_last_requests_are_kept() -> None:
    log = RequestLog(Meters(), Clock(1000.0), lambda _: None)
    for index in range(KEPT + 5):
        log.admitted(f"r{index}", submit())
        log.ended(f"r{index}", None)
    assert log.timeline("r4") is None
    assert log.timeline("r5") is not None
    assert [timeline.request_id for timeline in log.recent(2)] == [f"r{KEPT + 4}", f"r{KEPT + 3}"]
