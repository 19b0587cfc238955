"""Limits of requests: bodies, media, files, slow clients, malformed input."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Iterator

import httpx
import pytest

from omni_actors.client import OmniClient
from omni_actors.http_server.app import create_app
from omni_actors.http_server.settings import ServerSettings
from tests.support.servers import HttpPipeline, data_uri, film, picture, serving, sound
from tests.support.waiting import PATIENCE, until

HELLO = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def with_parts(*parts: dict) -> dict:
    return {"model": "echo", "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "x"}]}]}


@pytest.fixture(scope="module")
def small(echo_pipeline: HttpPipeline) -> Iterator[str]:
    """A server with small limits in front of the running pipeline."""
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
    )
    with serving(create_app(settings)) as url:
        yield url


def url_of(kind: str, url: str) -> dict:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


SHORT_SOUND, SMALL_PICTURE = data_uri("audio/wav", sound(0.1)), data_uri("image/png", picture(8, 8))
WITH_SOUND = url_of("video", data_uri("video/mp4", film(0.5, with_sound=True)))
FIRST = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("parts", "status", "param", "code"),
    [
        ([{"type": "text", "text": "y" * 200_000}], 413, None, "body_too_large"),
        (
            [{"type": "input_audio", "input_audio": {"data": "A" * 70_000, "format": "wav"}}],
            413,
            f"{FIRST}.input_audio.data",
            "media_too_large",
        ),
        ([url_of("image", data_uri("image/png", picture(101, 100)))], 413, f"{FIRST}.image_url.url", "media_too_large"),
        ([url_of("image", SMALL_PICTURE)] * 3, 400, "messages", "invalid_value"),
        ([url_of("image", SHORT_SOUND)], 400, f"{FIRST}.image_url.url", "invalid_url"),
        ([url_of("image", "data:image/png,AAAA")], 400, f"{FIRST}.image_url.url", "invalid_url"),
        (
            [url_of("video", data_uri("video/mp4", b"no video at all"))],
            400,
            f"{FIRST}.video_url.url",
            "malformed_media",
        ),
        ([{"type": "file", "file": {}}], 400, f"{FIRST}.file", "invalid_value"),
        ([WITH_SOUND, url_of("audio", SHORT_SOUND)], 400, "mm_processor_kwargs.use_audio_in_video", "invalid_payload"),
    ],
)
def test_each_limit_names_its_field(small: str, parts: list, status: int, param: str | None, code: str) -> None:
    body = with_parts(*parts)
    if WITH_SOUND in parts:
        body["mm_processor_kwargs"] = {"use_audio_in_video": True}
    response = httpx.post(f"{small}{CHAT}", json=body)
    error = response.json()["error"]
    assert response.status_code == status
    assert error["param"] == param
    assert error["code"] == code


def test_requests_just_within_the_limits_pass(small: str) -> None:
    body = with_parts(
        {"type": "audio_url", "audio_url": {"url": data_uri("audio/wav", sound(1.0))}},
        {"type": "image_url", "image_url": {"url": data_uri("image/png", picture(100, 100))}},
    )
    assert httpx.post(f"{small}{CHAT}", json=body).status_code == 200


def test_a_body_without_a_length_is_limited(small: str) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(30):
            yield b"x" * 10_000

    response = httpx.post(f"{small}{CHAT}", content=pieces(), headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_a_body_that_never_ends_times_out() -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with serving(create_app(ServerSettings(endpoint="ipc:///nowhere", read_timeout=0.5))) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10 * PATIENCE) as connection:
            connection.sendall(head + b"Content-Length: 1000\r\n\r\n{")
            assert b" 408 " in connection.recv(4096)


def test_a_client_that_does_not_read_is_disconnected(echo: HttpPipeline, caplog: pytest.LogCaptureFixture) -> None:
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
            connection.settimeout(10 * PATIENCE)
            connection.connect((host, int(port)))
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(data) + data
            )
            with OmniClient(echo.endpoint) as client:
                until(lambda: client.describe().in_flight == 1, 20, "the request runs")
                until(lambda: client.describe().in_flight == 0, 20, "the pipeline is done with it")
            until(lambda: "the client does not read" in caplog.text, 20, "the server gives up")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # what is under way comes at once
            received = b""
            while piece := connection.recv(1 << 20):
                received += piece
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_content_types_that_browsers_send_to_foreign_sites_are_refused(small: str, content_type: str) -> None:
    response = httpx.post(f"{small}{CHAT}", content=json.dumps(HELLO), headers={"content-type": content_type})
    assert response.status_code == 415


def test_uploads_touch_no_disk(echo_pipeline: HttpPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(create_app(ServerSettings(endpoint=echo_pipeline.endpoint))) as url:
        monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
        response = httpx.post(f"{url}/v1/files", files={"file": ("a", b"x" * 3_000_000)})
        assert (response.status_code, response.json()["bytes"]) == (200, 3_000_000)


@pytest.mark.parametrize(
    ("field", "name", "data", "status"),
    [
        ("file", "a", b"x" * 50_001, 413),
        ("file", "\u00e9" * 127, b"x", 200),
        ("file", "\u00e9" * 128, b"x", 400),
        ("file", "a", b"", 400),
        ("other", "a", b"x", 400),
    ],
)
def test_uploads_are_limited(small: str, field: str, name: str, data: bytes, status: int) -> None:
    response = httpx.post(f"{small}/v1/files", files={field: (name, data)})
    assert response.status_code == status
    assert status == 200 or response.json()["error"]["param"] == field
