"""Metrics, a timeline and the logs of the real stages."""

from __future__ import annotations

import functools
import re

import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.telemetry import metric_table as table
from omni_actors.telemetry.timeline import chrome_trace
from tests.support.observations import LOG_LINE, STAGES, assert_causal, grown, reported, scrape_until, settled
from tests.support.pipelines import RunningPipeline

pytestmark = pytest.mark.e2e

MARKER = "Zauberwort"
OTHER_LOG = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR)\b|\[transformers\]|Traceback")  # besides progress bars and C++
SHORT = {"thinker": {"max_tokens": 8}, "talker": {"max_tokens": 24}}


async def test_a_spoken_answer_is_timed_and_counted(tiny_pipeline: RunningPipeline) -> None:
    async with AsyncOmniClient(tiny_pipeline.endpoint) as client:
        before = await settled(client)
        stream = await client.submit(f"{MARKER}: why is the sea salt?", params=SHORT)
        await stream.result()
        timeline = await client.timeline(stream.request_id)
        now = await scrape_until(client, functools.partial(reported, before, done=1))
    assert sorted(stage.stage for stage in timeline.stages) == sorted(STAGES)
    assert_causal(timeline)
    assert all(stage.first_step for stage in timeline.stages), "vLLM reports when it schedules a request"
    tokens = {stage.stage: stage.output_tokens for stage in timeline.stages}
    assert tokens["thinker"] == 8
    assert tokens["talker"] == 24
    for stage, at_a_time in {"thinker": 1, "talker": 4}.items():  # tokens for one scheduling
        assert grown(before, now, table.OUTPUT_TOKENS, stage, "0") == tokens[stage]
        assert grown(before, now, table.STEP_SECONDS, stage, "0", suffix="_count") >= tokens[stage] / at_a_time
        assert grown(before, now, table.QUEUE_SECONDS, stage, "0", suffix="_count") == 1
    assert grown(before, now, table.STAGE_AUDIO, "code2wav", "0") == pytest.approx(24 * 480 / 24_000)
    row_bytes = 64 * 4  # of hidden size 64, one per token
    assert grown(before, now, table.EDGE_BYTES, "thinker/0", "talker/0") > 8 * row_bytes

    events = chrome_trace(timeline)["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {f"{stage}/0" for stage in STAGES} <= rows
    logs = {path.name: path.read_text() for path in (tiny_pipeline.run_dir / "logs").rglob("*.log")}
    assert set(logs) == {"http.log", *(f"{stage}-0.log" for stage in STAGES)}
    for name, text in logs.items():
        assert MARKER not in text, name
        other = [line for line in text.splitlines() if not LOG_LINE.match(line)]
        assert not [line for line in other if OTHER_LOG.search(line)], name
        assert " vllm." in text or name in ("http.log", "prompt-0.log"), "its lines are there, in our format"


async def test_metrics_that_vllm_reports(tiny_pipeline: RunningPipeline) -> None:
    async with AsyncOmniClient(tiny_pipeline.endpoint) as client:
        options = {"modalities": ["text"], "params": {"thinker": {"max_tokens": 150, "ignore_eos": True}}}
        streams = [await client.submit("Tell me a story.", **options) for _ in range(3)]
        busy = await scrape_until(client, lambda now: now.value(table.VLLM_RUNNING, "thinker", "0") == 3)
        assert 0 < busy.value(table.VLLM_KV, "thinker", "0") <= 1
        assert busy.value(table.STAGE_HELD, "thinker", "0") == 3
        for stream in streams:
            await stream.abort()
        idle = await scrape_until(client, lambda now: now.value(table.VLLM_RUNNING, "thinker", "0") == 0)
        assert idle.value(table.VLLM_KV, "thinker", "0") == 0


async def test_metrics_of_the_vocoders_budget(tiny_pipeline: RunningPipeline) -> None:
    long = {"thinker": {"max_tokens": 32}, "talker": {"max_tokens": 400}}
    async with AsyncOmniClient(tiny_pipeline.endpoint) as client:
        streams = [await client.submit("Tell me a long story.", params=long) for _ in range(2)]
        busy = await scrape_until(client, lambda now: now.value(table.BUDGET_HELD, "code2wav", "0") > 0)
        assert busy.value(table.BUDGET_BYTES, "code2wav", "0") == 2 << 30
        assert busy.value(table.BUDGET_HELD, "code2wav", "0") < 2 << 30
        assert busy.value(table.BUDGET_DEFERRALS, "code2wav", "0") == 0
        for stream in streams:
            await stream.abort()
        await scrape_until(
            client,
            lambda now: not any(now.value(each, "code2wav", "0") for each in (table.BUDGET_HELD, table.BUDGET_STEP)),
        )
