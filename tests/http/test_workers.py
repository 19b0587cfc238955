"""Several processes of the HTTP server on one port: what they share, and what one of them takes along when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from websockets.asyncio.client import connect

from tests.support.http_servers import http_servers
from tests.support.servers import HttpPipeline, launch, sound
from tests.support.waiting import PATIENCE, eventually, until

WORKERS = 3
MANY = 40  # connections, so that no process is left out: that happens once in four million runs


def each(url: str, method: str = "GET", **options: object) -> list[httpx.Response]:
    """Answers to a request over so many new connections that all processes have given some."""
    return [httpx.request(method, url, **options) for _ in range(MANY)]


@contextlib.contextmanager
def connected(pipeline: HttpPipeline) -> Iterator[tuple[list[socket.socket], dict[int, int]]]:
    """Connections that have been taken, and how many of them each process has."""
    parts = urlsplit(pipeline.url)
    with contextlib.ExitStack() as stack:
        address = (parts.hostname, parts.port)
        sockets = [stack.enter_context(socket.create_connection(address)) for _ in range(MANY)]

        def taken() -> dict[int, int]:
            listed = {process.pid: process.net_connections() for process in http_servers(pipeline)}
            return {
                pid: sum(one.raddr != () and one.laddr.port == parts.port for one in those)
                for pid, those in listed.items()
            }

        yield sockets, until(lambda: found if sum((found := taken()).values()) == MANY else None, what="connections")


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_connections_are_spread_over_all_processes(several: HttpPipeline) -> None:
    with connected(several) as (_, counts):
        assert len(counts) == WORKERS
        assert min(counts.values()) > 0, counts


def test_what_one_process_keeps_all_others_know(several: HttpPipeline) -> None:
    file = httpx.post(f"{several.url}/v1/files", files={"file": sound()}).json()["id"]
    assert {answer.status_code for answer in each(f"{several.url}/v1/files/{file}")} == {200}
    content = [{"type": "text", "text": "What is it?"}, {"type": "file", "file": {"file_id": file}}]
    asked = {"model": "echo", "messages": [{"role": "user", "content": content}]}
    heard = httpx.post(f"{several.url}/v1/chat/completions", json=asked)
    assert heard.status_code == 200, heard.text
    assert httpx.delete(f"{several.url}/v1/files/{file}").json()["deleted"]
    assert {answer.status_code for answer in each(f"{several.url}/v1/files/{file}")} == {404}

    first = httpx.post(f"{several.url}/v1/responses", json={"model": "echo", "input": "one"}).json()["id"]
    more = {"model": "echo", "input": " two", "previous_response_id": first}
    answers = each(f"{several.url}/v1/responses", "POST", json=more)
    assert {answer.json()["output"][0]["content"][0]["text"] for answer in answers} == {"oneone two"}

    spoken = {**asked, "messages": [{"role": "user", "content": "sea"}]}
    spoken |= {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}}
    said = httpx.post(f"{several.url}/v1/chat/completions", json=spoken).json()["choices"][0]["message"]["audio"]["id"]
    spoken["messages"] += [{"role": "assistant", "audio": {"id": said}}, {"role": "user", "content": "!"}]
    assert {answer.status_code for answer in each(f"{several.url}/v1/chat/completions", "POST", json=spoken)} == {200}


async def test_any_process_counts_the_sessions_of_all(several: HttpPipeline) -> None:
    url = several.url.replace("http", "ws", 1)

    def sessions() -> set[str]:
        texts = [httpx.get(f"{several.url}/metrics").text for _ in range(MANY // 4)]
        return {re.findall(r"^omni_realtime_sessions (\S+)$", text, re.M)[0] for text in texts}

    async with contextlib.AsyncExitStack() as stack:
        for _ in range(12):
            await stack.enter_async_context(connect(f"{url}/v1/realtime?model=echo"))
        await eventually(lambda: sessions() == {"12.0"}, what="twelve sessions in the metrics of every process")
        top = [sys.executable, "-m", "omni_actors.cli.main", "top", several.endpoint, "--once"]
        shown = await asyncio.to_thread(subprocess.run, top, capture_output=True, text=True, timeout=60 * PATIENCE)
        assert "12 realtime sessions" in " ".join(shown.stdout.split()), shown
    await eventually(lambda: sessions() == {"0.0"}, what="the end of the sessions in the metrics")


def test_a_process_that_dies_ends_its_own_connections_only(several: HttpPipeline) -> None:
    kept = httpx.post(f"{several.url}/v1/responses", json={"model": "echo", "input": "sea"}).json()["id"]
    with connected(several) as (sockets, counts):
        pid, lost = counts.popitem()
        psutil.Process(pid).kill()
        until(lambda: sum(map(is_open, sockets)) == MANY - lost, what="the end of its connections")
    until(lambda: len(http_servers(several)) == WORKERS, 30, "the process that takes its place")
    assert {answer.status_code for answer in each(f"{several.url}/v1/responses/{kept}")} == {200}


@pytest.mark.nightly
def test_a_process_that_stands_still_is_replaced(several: HttpPipeline) -> None:
    (stopped, *_) = http_servers(several)
    stopped.suspend()
    until(
        lambda: len(http_servers(several)) == WORKERS and stopped not in http_servers(several),
        30,
        "the process in its place",
    )
    assert {answer.status_code for answer in each(f"{several.url}/health")} == {200}


def test_the_port_of_several_processes_is_taken_for_another_server_of_this_user(several: HttpPipeline) -> None:
    port = urlsplit(several.url).port
    done = launch("--http", f"127.0.0.1:{port}", "--http-workers", "2")
    assert done.returncode == 2, done.stderr
    assert "Cannot listen" in done.stderr
