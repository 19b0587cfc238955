"""Priority from the client and over HTTP to real stages: an urgent request that comes last is answered before others.

The prompt stage is stopped while the requests are sent, so that all of them wait when it goes on. The thinker has 16
places, so that some of the ordinary requests wait until others have ended, and the urgent one must not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import psutil
import pytest

from omni_actors.client import AsyncOmniClient, Audio, RequestStream, Text
from tests.support.pipelines import RunningPipeline
from tests.support.servers import HttpPipeline

pytestmark = pytest.mark.e2e

ORDINARY = 20
PARAMS = {
    "thinker": {"max_tokens": 4, "ignore_eos": True},
    "talker": {"max_tokens": 13, "ignore_eos": True},
    "code2wav": {"num_steps": 2},
}


@pytest.fixture(autouse=True)
def idle(tiny_pipeline: RunningPipeline) -> Iterator[None]:
    yield
    tiny_pipeline.assert_idle()


@asynccontextmanager
async def prompt_stage_stopped(client: AsyncOmniClient) -> AsyncIterator[None]:
    (pid,) = [status.pid for status in (await client.describe()).stages if status.stage == "prompt"]
    psutil.Process(pid).suspend()
    try:
        yield
    finally:
        psutil.Process(pid).resume()


def test_an_urgent_request_is_answered_before_ordinary_ones_that_came_earlier(tiny_pipeline: RunningPipeline) -> None:
    first: dict[type, list[str]] = {Text: [], Audio: []}  # requests in the order of their first text and first sound

    async def read(stream: RequestStream) -> None:
        async for item in stream:
            if stream.request_id not in first[type(item)]:
                first[type(item)].append(stream.request_id)

    async def main() -> None:
        async with AsyncOmniClient(tiny_pipeline.endpoint) as client:
            async with prompt_stage_stopped(client):
                priorities = {f"prio-{number}": 0 for number in range(ORDINARY)} | {"prio-urgent": -1}
                streams = [
                    await client.submit("Hi", request_id=name, priority=priority, params=PARAMS, seed=1, timeout=120)
                    for name, priority in priorities.items()
                ]
                assert set(priorities) <= set((await client.describe()).requests)
            await asyncio.gather(*(read(stream) for stream in streams))

    asyncio.run(main())
    for kind in (Text, Audio):
        assert len(first[kind]) == ORDINARY + 1
        assert "prio-urgent" in first[kind][:16], first[kind]


def says_something(line: str) -> bool:
    """Whether a line of a streamed chat completion brings text."""
    if not line.startswith("data: {"):
        return False
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return bool(choices and choices[0]["delta"].get("content"))


@pytest.mark.parametrize("route", ["chat/completions", "audio/speech"])
def test_an_urgent_request_over_http_is_answered_before_ordinary_ones_that_came_earlier(
    tiny_http: HttpPipeline, route: str
) -> None:
    first: list[int] = []  # requests in the order of their first text or sound
    chat = {"messages": [{"role": "user", "content": "Hi"}], "modalities": ["text"], "stream": True}
    speech = {"input": "Hi", "response_format": "pcm"}

    async def ask(http: httpx.AsyncClient, number: int, priority: int) -> None:
        own = chat if "chat" in route else speech
        body = {"model": "tiny-qwen2.5-omni", "stage_params": PARAMS, "priority": priority, **own}
        async with http.stream("POST", f"{tiny_http.url}/v1/{route}", json=body) as response:
            assert response.status_code == 200
            if own is speech:
                async for _ in response.aiter_bytes():
                    if number not in first:
                        first.append(number)
                return
            async for line in response.aiter_lines():
                if says_something(line) and number not in first:
                    first.append(number)

    async def in_flight(client: AsyncOmniClient, count: int) -> None:
        async with asyncio.timeout(20):
            while (await client.describe()).in_flight < count:
                pass  # every question is a round trip

    async def main() -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with AsyncOmniClient(tiny_http.endpoint) as client, httpx.AsyncClient(limits=limits, timeout=60) as http:
            # A stopped stage is soon taken for dead, so the connections are made before.
            await asyncio.gather(*(http.get(f"{tiny_http.url}/health") for _ in range(ORDINARY + 1)))
            async with prompt_stage_stopped(client):
                asked = [asyncio.create_task(ask(http, number, 0)) for number in range(ORDINARY)]
                await in_flight(client, ORDINARY)
                asked.append(asyncio.create_task(ask(http, ORDINARY, -1)))
                await in_flight(client, ORDINARY + 1)
            await asyncio.gather(*asked)

    asyncio.run(main())
    assert len(first) == ORDINARY + 1
    assert ORDINARY in first[:16], first
