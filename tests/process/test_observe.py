"""Metrics, timelines, spans, live view and logs of running pipelines of echo stages."""

from __future__ import annotations

import itertools
import re

import psutil
import pytest

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
    assert {stage.stage: stage.outcome for stage in timeline.stages} == {
        "prompt": "engine_error",
        "thinker": "dropped",
        "talker": "dropped",
        "code2wav": "dropped",
    }


def test_after_a_partial_replay_nothing_is_counted_twice_and_the_timeline_has_both_attempts(launch):
    """The vocoder dies halfway: the stages before it go on, and the talker sends again what it had sent.

    No counter falls, although the vocoder that is started again begins at zero.
    """
    text = "abcdefghijklmnopqrstuvwxyz0123456789"
    launcher = launch(disturbed_chain(step_seconds=0.03)).wait_ready()
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


def test_logs_have_one_format_and_no_content(launch, short_path):
    marker = "Zauberwort"
    launcher = launch(chain(), "--run-dir", str(short_path / "run")).wait_ready()
    with OmniClient(launcher.endpoint) as client:
        client.generate(marker)
        tokens = [*marker.encode(), FAIL_TOKEN]
        stream = client.submit({"prompt_token_ids": tokens})
        with pytest.raises(EngineError):
            stream.result()
        with pytest.raises(OmniError):
            client.generate(marker, voice=marker)
    psutil.Process(launcher.pid_of("talker")).kill()
    until(lambda: launcher.output.count("talker/0 ready") == 2, 5, "a restart, which prints the log's tail")
    assert launcher.end() == 0
    logs = {path.name: path.read_text() for path in (short_path / "run" / "logs").rglob("*.log")}
    assert len(logs) == len(STAGES)
    for name, text in {**logs, "launcher": launcher.output}.items():
        assert marker not in text, name
        assert str(tokens)[1:-1] not in text, name
    for name, text in logs.items():
        assert text, name
        assert not [line for line in text.splitlines() if not LOG_LINE.match(line)], name
    (failed,) = [line for line in "".join(logs.values()).splitlines() if "request failed" in line]
    assert f" request={stream.request_id} " in failed
    assert any(" stage=talker/0 " in line for line in launcher.output.splitlines() if "ended: " in line)
