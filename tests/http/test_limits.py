"""What is refused, and how: sizes, forms, keys, hosts, missing stages."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy
import openai
import pytest

from omni_actors.client import OmniClient
from omni_actors.errors import ConfigError
from omni_actors.http_server.app import create_app
from omni_actors.http_server.media import VIDEO_RATE, Files, read_video
from omni_actors.http_server.settings import ServerSettings, check_exposure, parse_address
from tests.support.paths import REPOSITORY
from tests.support.processes import processes_titled
from tests.support.servers import HttpPipeline, film, free_port, picture, serving, sound

HELLO = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def with_parts(*parts: dict) -> dict:
    return {"model": "echo", "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "x"}]}]}


@pytest.fixture(scope="module")
def small(echo_pipeline: HttpPipeline) -> Iterator[str]:
    """A server with small limits beside the running pipeline."""
    settings = ServerSettings(
        endpoint=echo_pipeline.endpoint,
        body_bytes=100_000,
        bodies_bytes=150_000,
        media_parts=2,
        media_bytes=50_000,
        audio_seconds=1.0,
        image_pixels=100 * 100,
        video_seconds=1.0,
        files_bytes=60_000,
        read_timeout=0.5,
    )
    with serving(create_app(settings)) as url:
        yield url


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (with_parts({"type": "text", "text": "y" * 200_000}), 413, None, "body_too_large"),
        (
            with_parts({"type": "input_audio", "input_audio": {"data": "A" * 70_000, "format": "wav"}}),
            413,
            "messages[0].content[0].input_audio.data",
            "media_too_large",
        ),
        (
            with_parts({"type": "audio_url", "audio_url": {"url": data_uri("audio/wav", sound(1.2))}}),
            413,
            "messages[0].content[0].audio_url.url",
            "media_too_large",
        ),
        (
            with_parts({"type": "image_url", "image_url": {"url": data_uri("image/png", picture(101, 100))}}),
            413,
            "messages[0].content[0].image_url.url",
            "media_too_large",
        ),
        (
            with_parts({"type": "video_url", "video_url": {"url": data_uri("video/mp4", film(1.5))}}),
            413,
            "messages[0].content[0].video_url.url",
            "media_too_large",
        ),
        (
            with_parts(*[{"type": "image_url", "image_url": {"url": data_uri("image/png", picture(8, 8))}}] * 3),
            400,
            "messages",
            "invalid_value",
        ),
        (
            with_parts({"type": "image_url", "image_url": {"url": data_uri("audio/wav", sound(0.1))}}),
            400,
            "messages[0].content[0].image_url.url",
            "invalid_url",
        ),
        (
            with_parts({"type": "image_url", "image_url": {"url": "data:image/png,AAAA"}}),
            400,
            "messages[0].content[0].image_url.url",
            "invalid_url",
        ),
        (
            with_parts({"type": "video_url", "video_url": {"url": data_uri("video/mp4", b"no video at all")}}),
            400,
            "messages[0].content[0].video_url.url",
            "malformed_media",
        ),
        (with_parts({"type": "file", "file": {}}), 400, "messages[0].content[0].file", "invalid_value"),
    ],
)
def test_limits(small: str, body: dict, status: int, param: str | None, code: str) -> None:
    response = httpx.post(f"{small}{CHAT}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)


def test_just_within_the_limits(small: str) -> None:
    body = with_parts(
        {"type": "audio_url", "audio_url": {"url": data_uri("audio/wav", sound(1.0))}},
        {"type": "image_url", "image_url": {"url": data_uri("image/png", picture(100, 100))}},
    )
    assert httpx.post(f"{small}{CHAT}", json=body).status_code == 200


def test_a_small_file_that_unpacks_to_a_huge_image(small: str) -> None:
    import io

    from PIL import Image

    sink = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(sink, "PNG")
    assert len(sink.getvalue()) < 50_000
    body = with_parts({"type": "image_url", "image_url": {"url": data_uri("image/png", sink.getvalue())}})
    assert httpx.post(f"{small}{CHAT}", json=body).status_code == 413


def test_body_without_a_length(small: str) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(30):
            yield b"x" * 10_000

    response = httpx.post(f"{small}{CHAT}", content=pieces(), headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_body_that_never_ends(small: str) -> None:
    host, port = small.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000\r\n\r\n{"
        )
        assert b" 408 " in connection.recv(4096)


def test_bodies_of_all_requests_together_are_bounded() -> None:
    """While one body of 90 kB is being handled, another one does not fit into 150 kB."""
    settings = ServerSettings(endpoint="ipc:///tmp/nobody-listens-here", body_bytes=100_000, bodies_bytes=150_000)
    body = with_parts({"type": "text", "text": "y" * 90_000})

    async def run(url: str) -> list[int]:
        async with httpx.AsyncClient() as client:
            first = asyncio.create_task(client.post(f"{url}{CHAT}", json=body, timeout=20))
            await asyncio.sleep(0.3)
            second = await client.post(f"{url}{CHAT}", json=body)
            assert second.headers["retry-after"]
            assert second.json()["error"]["code"] == "overloaded"
            assert (await first).json()["error"]["code"] == "timeout"  # the coordinator does not answer: no hang
            third = await client.post(f"{url}{CHAT}", json=body, timeout=20)
            assert third.json()["error"]["code"] == "timeout", "the bytes of the first are free again"
            return [second.status_code, third.status_code]

    with serving(create_app(settings)) as url:
        assert asyncio.run(run(url)) == [503, 503]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds} s: {what}"
        time.sleep(0.02)


def test_a_client_that_reads_nothing_is_cut_off(echo: HttpPipeline) -> None:
    body = {
        "model": "echo",
        "stream": True,
        "modalities": ["text", "audio"],
        "messages": [{"role": "user", "content": "x" * 4000}],
    }
    data = json.dumps(body).encode()
    with serving(create_app(ServerSettings(endpoint=echo.endpoint, write_timeout=0.5))) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(20)
            connection.connect((host, int(port)))
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(data) + data
            )
            with OmniClient(echo.endpoint) as client:
                wait_until(lambda: client.describe().in_flight == 1, "the request runs")
                wait_until(lambda: client.describe().in_flight == 0, "the pipeline is done with it")
            time.sleep(2.0)  # four times what the server waits for a piece to be read
            received = b""
            while piece := connection.recv(1 << 20):
                received += piece
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_forms_that_browsers_send_to_foreign_sites_are_refused(small: str, content_type: str) -> None:
    response = httpx.post(f"{small}{CHAT}", content=json.dumps(HELLO), headers={"content-type": content_type})
    assert response.status_code == 415


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"[" * 100_000, b'{"model": "\\ud800"}', b"\xff"])
def test_bodies_that_are_no_request(small: str, body: bytes) -> None:
    response = httpx.post(f"{small}{CHAT}", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (400, 413)
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_lone_surrogates_are_refused(small: str) -> None:
    body = b'{"model": "echo", "messages": [{"role": "user", "content": "a\\ud800b"}]}'
    response = httpx.post(f"{small}{CHAT}", content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[0].content")


def test_unknown_paths_and_methods_have_the_shape_of_errors(small: str) -> None:
    for response, status in ((httpx.get(f"{small}/v1/nothing"), 404), (httpx.get(f"{small}{CHAT}"), 405)):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


# -- files and video --------------------------------------------------------------------------------------------------


def test_files_are_bounded_in_bytes_and_time() -> None:
    files = Files(limit=100, seconds=0.05)
    first = files.add("a", "user_data", b"x" * 60)
    second = files.add("b", "user_data", b"x" * 60)
    assert files.find(first.id) is None, "the oldest goes first"
    assert files.find(second.id) is second
    time.sleep(0.06)
    assert files.find(second.id) is None


def test_upload_limits(small: str) -> None:
    response = httpx.post(f"{small}/v1/files", files={"file": ("a", b"x" * 50_001)})
    assert response.status_code == 413
    response = httpx.post(f"{small}/v1/files", files={"file": ("a", b"")})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")
    response = httpx.post(f"{small}/v1/files", files={"other": ("a", b"x")})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")


def test_video_becomes_two_frames_a_second() -> None:
    frames, rate = read_video(film(2.0), 10.0, "x")
    assert rate == VIDEO_RATE
    assert (frames.shape, frames.dtype) == ((4, 64, 64, 3), numpy.uint8)
    large, _ = read_video(film(0.5, side=1280), 10.0, "x")
    assert large.shape[1:] == (640, 640, 3)


# -- keys and hosts ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(echo_pipeline: HttpPipeline) -> Iterator[str]:
    settings = ServerSettings(endpoint=echo_pipeline.endpoint, api_key="sésame", check_host=False)
    with serving(create_app(settings)) as url:
        yield url


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "Basic c8OpczpzZXNhbWU=", "s\xe9same"])
def test_wrong_keys(keyed: str, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    for method, path in (
        ("POST", CHAT),
        ("GET", "/v1/models"),
        ("GET", "/v1/status"),
        ("GET", "/metrics"),
        ("GET", "/v1/requests"),
        ("GET", "/v1/requests/x/timeline"),
        ("GET", "/openapi.json"),
        ("POST", "/v1/files"),
        ("GET", "/nothing"),
    ):
        response = httpx.request(method, f"{keyed}{path}", headers=headers)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_key_and_openai_client(echo_pipeline: HttpPipeline) -> None:
    settings = ServerSettings(endpoint=echo_pipeline.endpoint, api_key="sesame", check_host=False)
    with serving(create_app(settings)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0)
        assert client.chat.completions.create(**HELLO).choices[0].message.content == "hi"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).chat.completions.create(**HELLO)


def test_probes_and_page_need_no_key(keyed: str) -> None:
    for path in ("/health", "/", "/app.js", "/audio.js", "/common.js", "/timeline.js", "/style.css"):
        assert httpx.get(f"{keyed}{path}").status_code == 200, path


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8000", "[", ""])
def test_foreign_host_names_are_refused(small: str, host: str) -> None:
    """A page of evil.example whose name resolves to 127.0.0.1 reaches the port, but sends its own name."""
    response = httpx.get(f"{small}/v1/models", headers={"host": host})
    assert response.status_code in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:8000"])
def test_loopback_host_names_pass(small: str, host: str) -> None:
    assert httpx.get(f"{small}/v1/models", headers={"host": host}).status_code == 200


def test_exposure() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check_exposure(host, None, False)
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.com"):
        with pytest.raises(ConfigError, match="OMNI_ACTORS_API_KEY"):
            check_exposure(host, None, False)
        check_exposure(host, "key", False)
        check_exposure(host, None, True)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("8000", ("127.0.0.1", 8000)), ("[::1]:9", ("::1", 9)), ("h:0", ("h", 0))],
)
def test_addresses(text: str, wanted: tuple[str, int]) -> None:
    assert parse_address(text) == wanted


@pytest.mark.parametrize("text", ["", "a:b", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:-1", "127.0.0.1:١"])
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(text)


# -- processes --------------------------------------------------------------------------------------------------------


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omni_actors.launch", "stage_configs/echo.yaml", *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30, env={**os.environ, **environment}
    )


def test_launcher_refuses_wrong_addresses() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        addresses = (f"127.0.0.1:{taken.getsockname()[1]}", "0.0.0.0:0", "127.0.0.1:port")
        with ThreadPoolExecutor() as pool:
            in_use, without_key, no_port = pool.map(lambda address: launch("--http", address), addresses)
    assert (in_use.returncode, "Cannot listen" in in_use.stderr) == (2, True), in_use.stderr
    assert (without_key.returncode, "OMNI_ACTORS_API_KEY" in without_key.stderr) == (2, True), without_key.stderr
    assert no_port.returncode == 2


def test_health_names_a_dead_stage_and_the_server_comes_back() -> None:
    with HttpPipeline() as pipeline:
        launcher = pipeline.process.pid
        # The HTTP server dies: the launcher starts it again on the same socket, so nobody is refused.
        (server,) = processes_titled("omni:http", launcher)
        os.kill(server, signal.SIGKILL)
        assert pipeline.openai(max_retries=2, timeout=20).chat.completions.create(**HELLO).choices
        # A stage dies: health says which.
        talker = stage_pid(pipeline, "talker")
        os.kill(talker, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while (response := httpx.get(f"{pipeline.url}/health")).status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.json()["missing"][0].startswith("talker/0")


def stage_pid(pipeline: HttpPipeline, stage: str) -> int:
    from omni_actors.client import OmniClient

    with OmniClient(pipeline.endpoint) as client:
        return next(status.pid for status in client.describe().stages if status.stage == stage)


def test_health_while_the_stages_load() -> None:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "omni_actors.launch",
        "stage_configs/echo.yaml",
        "--http",
        f"127.0.0.1:{port}",
        "--set",
        "stages.talker.engine.start_seconds=4",
    ]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 15
        seen: set[tuple[int, str]] = set()
        while time.monotonic() < deadline and (200, "") not in seen:
            try:
                response = httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
            except httpx.TransportError:
                time.sleep(0.02)
                continue
            seen.add((response.status_code, ",".join(response.json().get("missing", []))))
            time.sleep(0.02)
        assert (503, "talker/0 (loading)") in seen
        assert (200, "") in seen
    finally:
        process.kill()
        process.communicate()
    # The server dies with its launcher, however that ended.
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            httpx.get(f"http://127.0.0.1:{port}/", timeout=1)
        except httpx.ConnectError:
            return
        time.sleep(0.05)
    raise AssertionError("the HTTP server outlived its launcher")


def test_server_alone_beside_a_pipeline(echo: HttpPipeline, tmp_path: Path) -> None:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "omni_actors.http_server",
        "--endpoint",
        echo.endpoint,
        "--http",
        f"127.0.0.1:{port}",
        "--served-name",
        "sea",
    ]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
    try:
        from tests.support.servers import wait_healthy

        wait_healthy(f"http://127.0.0.1:{port}")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
        assert [model.id for model in client.models.list()] == ["sea"]
        assert client.chat.completions.create(**{**HELLO, "model": "sea"}).model == "sea"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**HELLO)
        process.terminate()
        assert process.wait(10) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
    assert "hi" not in [word.strip() for word in (tmp_path / "log").read_text().split()], "user content in the log"
