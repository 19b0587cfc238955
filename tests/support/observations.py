"""Read the metrics, timelines and logs of a running pipeline."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Callable

from omni_actors.cli.top import Scrape, scrape
from omni_actors.client import AsyncOmniClient
from omni_actors.protocol.messages import RequestTimeline
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.metrics import Metric
from tests.support.waiting import PATIENCE

REPORTS = 3  # one may have been on its way, and one is made while the other is read
STAGES = ("prompt", "thinker", "talker", "code2wav")
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) \S+( \S+=\S+)* [\w.]+: ")


async def scrape_until(client: AsyncOmniClient, enough: Callable[[Scrape], bool]) -> Scrape:
    """The metrics as soon as the stages have reported enough; they do so once per heartbeat interval."""
    deadline = time.monotonic() + 5 * PATIENCE
    while not enough(now := await scrape(client)):
        assert time.monotonic() < deadline, "the stages did not report the expected metrics"
        await asyncio.sleep(0.05)
    return now


async def settled(client: AsyncOmniClient) -> Scrape:
    """The metrics with all in them that has ended before: every stage has reported several times since."""
    now = await scrape(client)
    for _ in range(REPORTS):
        now = await scrape_until(client, functools.partial(_all_reported, now))
    return now


def _all_reported(before: Scrape, now: Scrape) -> bool:
    return all(grown(before, now, table.CPU_SECONDS, stage, "0") > 0 for stage in STAGES)


def grown(before: Scrape, now: Scrape, metric: Metric, *labels: str, suffix: str = "") -> float:
    """The difference of one series between two scrapes."""
    return now.value(metric, *labels, suffix=suffix) - before.value(metric, *labels, suffix=suffix)


def reported(before: Scrape, now: Scrape, done: int) -> bool:
    """Whether every stage has reported the end of `done` more requests. Each reports at its own time."""
    return all(grown(before, now, table.STAGE_REQUESTS, stage, "0", "done") == done for stage in STAGES)


def event_names(timeline: RequestTimeline) -> list[str]:
    """The names of a timeline's events, in order."""
    return [event.name for event in timeline.events]


def assert_causal(timeline: RequestTimeline) -> None:
    """Check that nothing comes before its cause."""
    times = {event.name: event.time for event in timeline.events}
    assert times["submitted"] <= times["admitted"] <= times["bound"] <= times["ended"]
    for stage in timeline.stages:
        moments = [
            stage.expected,
            stage.first_input,
            stage.started,
            stage.first_step,
            stage.first_output,
            stage.last_output,
            stage.ended,
        ]
        assert moments == sorted(moments), stage
        assert times["bound"] <= stage.expected, stage
        assert stage.ended <= times["ended"], stage
        for transfer in stage.transfers:
            assert stage.expected <= transfer.first_received <= transfer.last_received <= stage.ended
            assert transfer.first_sent <= transfer.first_received
            assert transfer.last_sent <= transfer.last_received
            source = next(other for other in timeline.stages if f"{other.stage}/{other.replica}" == transfer.source)
            assert source.first_output <= transfer.first_sent
