"""A slow stage or client sets the pace back to admission, nothing piles up, and clients share a pipeline's slots."""

from __future__ import annotations

import asyncio
import signal

import httpx
import psutil
import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import Overloaded
from omni_actors.http_server.app import create_app
from omni_actors.http_server.settings import ServerSettings
from omni_actors.protocol.codec import encode
from omni_actors.protocol.fields import Header, pack_token_ids
from omni_actors.protocol.messages import Failed, Submit
from omni_actors.protocol.payloads import Prompt
from omni_actors.transport.sockets import Sockets, try_send
from tests.support.answers import assert_echo, collect
from tests.support.builders import flow_chain
from tests.support.flooder import TOKENS, flooding
from tests.support.launcher import launched
from tests.support.processes import processes_of, shared_memory_of
from tests.support.servers import serving
from tests.support.waiting import eventually, until

SMALL = {"edge_messages": 32, "outbox_messages": 16, "backlog_requests": 4}


async def test_a_last_stage_that_stands_still_throttles_the_others_and_then_admission(launch):
    data = flow_chain(SMALL)
    data["coordinator"] |= {"max_queued": 8, "heartbeat_timeout": 60}
    for stage in data["stages"]:
        stage["stall_timeout"] = 60
    echo = launch(data).wait_ready()
    last, most, tasks = psutil.Process(echo.pid_of("code2wav")), {}, []
    async with AsyncOmniClient(echo.endpoint) as client:
        last.suspend()
        try:

            async def both_wait() -> bool:
                for stage in (await client.describe()).stages:
                    for name, value in stage.counts.items():
                        key = f"{stage.stage} {name}"
                        most[key] = max(most.get(key, 0), value)
                return bool(most.get("talker outbox") and most.get("thinker outbox"))

            while sum(task.done() for task in tasks) < 20:
                assert len(tasks) < 400
                tasks.append(asyncio.create_task(client.generate(f"{len(tasks):04d}" * 2, timeout=100)))
                await both_wait()
            await eventually(both_wait, 60, "messages wait in the outboxes of talker and thinker")
        finally:
            last.resume()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, Overloaded)]
    assert len(refused) >= 20
    assert all(error.retry_after and error.stage for error in refused)
    for number, answer in enumerate(answers):
        if answer not in refused:
            assert_echo(answer, f"{number:04d}" * 2)
    # One step of a stage makes one message per request that it computes, of those that it holds: of eight in all.
    assert most["talker outbox"] <= 16 + most["talker requests"], most
    assert most["thinker outbox"] <= 16 + 2 * most["thinker requests"], most
    echo.wait_idle()


async def test_only_the_slow_client_is_ended(launch):
    def submit_frames(request_id: str, tokens: int) -> list:
        body = Submit(prompt=Prompt(token_ids=pack_token_ids([120] * tokens)), modalities=("text", "audio"))
        return encode(Header("", request_id), body)

    flow = {"client_bytes": 60_000, "client_window_bytes": 1 << 20}
    step = {"step_seconds": 0.005}
    echo = launch(flow_chain(flow, thinker=step, code2wav=step)).wait_ready()
    sockets = Sockets()
    try:
        slow = sockets.dealer(echo.endpoint, b"slow")[0]
        for number in range(5):
            try_send(slow, submit_frames(f"slow {number}", 700))
        async with AsyncOmniClient(echo.endpoint) as good:
            running = [asyncio.create_task(good.generate("x" * 100)) for _ in range(3)]

            async def dropped() -> bool:
                return "dropped_client_slow" in (await good.describe()).counts

            await eventually(dropped, 10, "the slow client is dropped")
            for answer in await asyncio.gather(*running):
                assert_echo(answer, "x" * 100)
        echo.wait_idle()
        ends = [envelope for envelope in collect(slow, [], 5) if isinstance(envelope.body, Failed)]
        assert {envelope.header.request_id for envelope in ends} == {f"slow {number}" for number in range(5)}
        assert {(e.body.code.value, e.body.retryable) for e in ends} == {("slow_client", True)}
        try_send(slow, submit_frames("again", 3))
        assert "x" in "".join(getattr(envelope.body, "text", "") for envelope in collect(slow, [], 1)), "served again"
    finally:
        sockets.context.destroy(linger=0)


WIDE = {"row_width": 100_000}  # 200 kB a row


async def test_large_rows_go_by_the_arena_and_all_of_it_is_freed(launch):
    echo = launch(flow_chain({}, prompt=WIDE, thinker=WIDE, talker=WIDE)).wait_ready()
    async with AsyncOmniClient(echo.endpoint) as client:
        for _ in range(4):
            tasks = [asyncio.create_task(client.generate(f"{i} hello" * 3, timeout=30)) for i in range(8)]
            streams = [await client.submit("y" * 100) for _ in range(4)]
            await asyncio.sleep(0.05)
            for stream in streams:
                await stream.abort()
            for number, task in enumerate(tasks):
                assert_echo(await task, f"{number} hello" * 3)
    echo.wait_idle()
    blocks = {stage.stage: stage.counts.get("total_blocks", 0) for stage in echo.describe().stages}
    assert blocks["thinker"] > 100, blocks  # the first ones go as frames, until the talker has said that it reads
    assert not shared_memory_of(processes_of(echo.folder)), "nothing has a name in /dev/shm"


NEVER = 1000.0  # seconds
WINDOW = 256  # messages


@pytest.fixture(scope="module")
def shared_pipeline():
    """16 slots. Long requests outlive every test; a client that does not read is left alone."""
    flow = {"client_window_messages": WINDOW, "client_messages": 1_000_000, "client_bytes": 1 << 30}
    flow["client_stall_seconds"] = NEVER
    # The sound of a window is more than what the kernel keeps for a process that is stopped.
    data = flow_chain(flow, thinker={"step_seconds": 0.02}, code2wav={"samples_per_token": 960})
    data["coordinator"] |= {"max_in_flight": 16, "max_queued": 24}
    with launched(data) as pipeline:
        yield pipeline


@pytest.fixture
def pipeline(shared_pipeline):
    """The same, idle again after each test."""
    yield shared_pipeline
    shared_pipeline.wait_idle(20)


def tokens_sent(metrics: str) -> float:
    return next(float(line.split()[1]) for line in metrics.splitlines() if line.startswith("omni_text_tokens_total"))


async def test_a_client_that_reads_nothing_and_vanishes_holds_nothing(pipeline):
    """Also one that is stopped, and whatever is in its window: nothing is sent to either of them any more."""
    async with AsyncOmniClient(pipeline.endpoint) as watcher:

        async def none_runs() -> bool:
            return not (await watcher.describe()).in_flight

        async def tokens_more_than(count: float) -> bool:
            return tokens_sent(await watcher.metrics()) > count

        with flooding(pipeline.endpoint, 3) as stopped:
            await eventually(lambda: tokens_more_than(0), 10, "its requests run")
            stopped.send_signal(signal.SIGSTOP)  # a few seconds later its connection is taken for lost
            before = tokens_sent(await watcher.metrics())
            await eventually(lambda: tokens_more_than(before + WINDOW), 10, "more text than its window has room for")
            with flooding(pipeline.endpoint, 12) as killed:
                before = tokens_sent(await watcher.metrics())
                await eventually(lambda: tokens_more_than(before + 4 * WINDOW), 20, "more than both have room for")
                assert (await watcher.describe()).in_flight >= 12
                killed.send_signal(signal.SIGKILL)
                await eventually(none_runs, 15, "the requests of both end")
            counts = (await watcher.describe()).counts
            assert counts["dropped_client_lost"] >= 2
            assert "dropped_client_slow" not in counts


async def test_newcomers_are_served_while_a_client_has_all_that_it_can_get(pipeline):
    with flooding(pipeline.endpoint, 60):
        async with AsyncOmniClient(pipeline.endpoint) as client:

            async def holds_all() -> bool:
                description = await client.describe()
                return (description.in_flight, description.queued) == (15, 24)

            await eventually(holds_all, 10, "the flood")
            for _ in range(3):
                assert (await client.generate("hello", modalities=["text"])).text == "hello"
            two = await asyncio.gather(*(client.generate("two", modalities=["text"]) for _ in range(2)))
            assert [output.text for output in two] == ["two", "two"], "one after the other, through the queue"
            description = await client.describe()
            assert (description.in_flight, description.queued) == (15, 23), "a queued one of the flooder made room"


def test_an_http_client_that_floods_leaves_room_for_another_address(pipeline):
    def body(text: str) -> dict[str, object]:
        return {"model": "echo", "messages": [{"role": "user", "content": text}]}

    async def run(url: str) -> str:
        route = f"{url}/v1/chat/completions"
        other = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(timeout=60) as flooder, httpx.AsyncClient(transport=other, timeout=60) as client:
            flood = [asyncio.create_task(flooder.post(route, json=body("x" * TOKENS))) for _ in range(20)]
            await eventually(lambda: pipeline.describe().queued == 6, 10, "14 of 20 run")
            answer = (await client.post(route, json=body("hello"))).json()
            assert pipeline.describe().in_flight == 14
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
            return answer["choices"][0]["message"]["content"]

    with serving(create_app(ServerSettings(endpoint=pipeline.endpoint))) as url:
        assert asyncio.run(run(url)) == "hello"
        until(lambda: not pipeline.describe().in_flight, 10, "the flood ends with its connections")
