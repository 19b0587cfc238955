"""What the real stages tell: vLLM's figures, a request's timeline, logs."""

from __future__ import annotations

import asyncio
import functools
import re
from xml.etree import ElementTree

import pytest

from omni_actors.cli.top import look
from omni_actors.client import AsyncOmniClient
from omni_actors.telemetry import metric_table as table
from omni_actors.telemetry.chart import chart
from omni_actors.telemetry.drawing import svg
from tests.process.test_observe import LOG_LINE, STAGES, assert_causal, grown, settled, told
from tests.support.pipelines import RunningPipeline

pytestmark = pytest.mark.e2e

MARKER = "Zauberwort"
TOLD_SECONDS = 1.0  # two heartbeats, after which the stages have told of all that was before
OTHER_LOG = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR)\b|\[transformers\]|Traceback")  # beside progress bars and C++
SHORT = {"thinker": {"max_tokens": 8}, "talker": {"max_tokens": 24}}


async def test_a_spoken_answer_is_timed_and_counted(tiny_pipeline: RunningPipeline) -> None:
    async with AsyncOmniClient(tiny_pipeline.endpoint) as client:
        await asyncio.sleep(TOLD_SECONDS)  # of what other tests asked for
        before = await look(client)
        stream = await client.submit(f"{MARKER}: why is the sea salt?", params=SHORT)
        await stream.result()
        timeline = await client.timeline(stream.request_id)
        now = await settled(client, functools.partial(told, before, done=1))
    assert sorted(stage.stage for stage in timeline.stages) == sorted(STAGES)
    assert_causal(timeline)
    assert all(stage.first_step for stage in timeline.stages), "vLLM says when it schedules a request"
    tokens = {stage.stage: stage.output_tokens for stage in timeline.stages}
    assert (tokens["thinker"], tokens["talker"]) == (8, 24)
    for stage in ("thinker", "talker"):
        assert grown(before, now, table.OUTPUT_TOKENS, stage, "0") == tokens[stage]
        assert grown(before, now, table.STEP_SECONDS, stage, "0", suffix="_count") >= tokens[stage]
        assert grown(before, now, table.QUEUE_SECONDS, stage, "0", suffix="_count") == 1
    assert grown(before, now, table.STAGE_AUDIO, "code2wav", "0") == pytest.approx(24 * 480 / 24_000)
    row_bytes = 64 * 4  # of hidden size 64, one per token
    assert grown(before, now, table.EDGE_BYTES, "thinker/0", "talker/0") > 8 * row_bytes

    words = "".join(ElementTree.fromstring(svg(chart(timeline)).encode()).itertext())
    assert all(f"{stage}/0" in words for stage in STAGES)
    logs = {path.name: path.read_text() for path in (tiny_pipeline.run_dir / "logs").rglob("*.log")}
    assert set(logs) == {"http.log", *(f"{stage}-0.log" for stage in STAGES)}
    for name, text in logs.items():
        assert MARKER not in text, name
        other = [line for line in text.splitlines() if not LOG_LINE.match(line)]
        assert not [line for line in other if OTHER_LOG.search(line)], name
        assert " vllm." in text or name in ("http.log", "prompt-0.log"), "its lines are there, in our format"


async def test_vllms_own_figures(tiny_pipeline: RunningPipeline) -> None:
    async with AsyncOmniClient(tiny_pipeline.endpoint) as client:
        options = {"modalities": ["text"], "params": {"thinker": {"max_tokens": 150, "ignore_eos": True}}}
        streams = [await client.submit("Tell me a story.", **options) for _ in range(3)]
        busy = await settled(client, lambda now: now.value(table.VLLM_RUNNING, "thinker", "0") == 3)
        assert 0 < busy.value(table.VLLM_KV, "thinker", "0") <= 1
        assert busy.value(table.STAGE_HELD, "thinker", "0") == 3
        for stream in streams:
            await stream.abort()
        idle = await settled(client, lambda now: now.value(table.VLLM_RUNNING, "thinker", "0") == 0)
        assert idle.value(table.VLLM_KV, "thinker", "0") == 0
