"""Clients share the slots of a pipeline, and one that is gone has none."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.http_server.app import create_app
from omni_actors.http_server.settings import ServerSettings
from tests.support.builders import flow_chain
from tests.support.flooder import TOKENS, flooding
from tests.support.launcher import launched
from tests.support.servers import serving
from tests.support.waiting import eventually, until

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
