"""The endpoint of `--metrics`: bounded, whoever connects, and closed to web pages."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from omni_actors.telemetry.endpoint import CONNECTIONS, MetricsEndpoint

TEXT = "# TYPE omni_things gauge\nomni_things 3.0\n"


async def fetch() -> str:
    return TEXT


@pytest.fixture(params=["127.0.0.1", "::1", "0.0.0.0"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[MetricsEndpoint]:
    """Listens on the address of the parameter."""
    made: list[MetricsEndpoint] = []
    ready, done = threading.Event(), threading.Event()

    async def run() -> None:
        made.append(MetricsEndpoint(request.param, 0, fetch))
        ready.set()
        await asyncio.to_thread(done.wait, 60)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(10)
    yield made[0]
    made[0].close()
    done.set()
    thread.join()


def test_silent_connections_make_room_for_scrapes(endpoint: MetricsEndpoint) -> None:
    url = httpx.URL(endpoint.url)
    before = threading.active_count()
    silent = [socket.create_connection((url.host, url.port), timeout=20) for _ in range(5 * CONNECTIONS)]
    for half in silent[::2]:
        half.sendall(b"GET /metrics HTTP/1.1\r\n")
    assert "omni_things 3.0" in httpx.get(url).text
    for made in silent[: 4 * CONNECTIONS]:
        assert made.recv(1) == b""
    assert threading.active_count() <= before + CONNECTIONS + 1
    for made in silent:
        made.close()


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "[", ""])
def test_on_loopback_a_page_of_another_name_reads_nothing(endpoint: MetricsEndpoint, host: str) -> None:
    answer = httpx.get(endpoint.url, headers={"host": host})
    expected = 200 if "0.0.0.0" in endpoint.url else 403
    assert answer.status_code == expected
    assert ("omni_things" in answer.text) == (expected == 200)
