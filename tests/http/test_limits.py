"""Limits of requests: bodies, media, files, slow clients, and requests that are made to cost much."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import tempfile
from collections.abc import Iterator

import httpx
import pytest

from omni_actors.client import OmniClient
from omni_actors.http_server.app import create_app
from omni_actors.http_server.settings import ServerSettings
from tests.support.http_servers import http_server
from tests.support.servers import HttpPipeline, data_uri, film, picture, serving, sound
from tests.support.waiting import PATIENCE, until

HELLO = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def with_parts(*parts: dict) -> dict:
    return {"model": "echo", "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "x"}]}]}


@pytest.fixture(scope="module")
def small(echo_pipeline: HttpPipeline) -> Iterator[str]:
    """A server with small limits in front of the running pipeline."""
    seconds = {"audio_seconds": 1.0, "video_seconds": 1.0}
    sizes = {"body_bytes": 100_000, "bodies_bytes": 150_000, "media_bytes": 50_000, "files_bytes": 60_000}
    most = {"media_parts": 2, "image_pixels": 100 * 100}
    settings = ServerSettings(endpoint=echo_pipeline.endpoint, **sizes, **most, **seconds)
    with serving(create_app(settings)) as url:
        yield url


def url_of(kind: str, url: str) -> dict:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


SHORT_SOUND, SMALL_PICTURE = data_uri("audio/wav", sound(0.1)), data_uri("image/png", picture(8, 8))
WITH_SOUND = url_of("video", data_uri("video/mp4", film(0.5, with_sound=True)))
LONG_SOUND = {"data": "A" * 70_000, "format": "wav"}
FIRST = "messages[0].content[0]"


LIMITS = [
    ([{"type": "text", "text": "y" * 200_000}], 413, None, "body_too_large"),
    ([{"type": "input_audio", "input_audio": LONG_SOUND}], 413, f"{FIRST}.input_audio.data", "media_too_large"),
    ([url_of("image", data_uri("image/png", picture(101, 100)))], 413, f"{FIRST}.image_url.url", "media_too_large"),
    ([url_of("image", SMALL_PICTURE)] * 3, 400, "messages", "invalid_value"),
    ([url_of("image", SHORT_SOUND)], 400, f"{FIRST}.image_url.url", "invalid_url"),
    ([url_of("image", "data:image/png,AAAA")], 400, f"{FIRST}.image_url.url", "invalid_url"),
    ([url_of("video", data_uri("video/mp4", b"none"))], 400, f"{FIRST}.video_url.url", "malformed_media"),
    ([{"type": "file", "file": {}}], 400, f"{FIRST}.file", "invalid_value"),
    ([WITH_SOUND, url_of("audio", SHORT_SOUND)], 400, "mm_processor_kwargs.use_audio_in_video", "invalid_payload"),
]


@pytest.mark.parametrize(("parts", "status", "param", "code"), LIMITS, ids=[str(case[2:]) for case in LIMITS])
def test_each_limit_names_its_field(small: str, parts: list, status: int, param: str | None, code: str) -> None:
    body = with_parts(*parts)
    if WITH_SOUND in parts:
        body["mm_processor_kwargs"] = {"use_audio_in_video": True}
    response = httpx.post(f"{small}{CHAT}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)


def test_bodies_within_the_limits_pass_and_no_others(small: str) -> None:
    sounds, pictures = data_uri("audio/wav", sound(1.0)), data_uri("image/png", picture(100, 100))
    body = with_parts(url_of("audio", sounds), url_of("image", pictures))
    assert httpx.post(f"{small}{CHAT}", json=body).status_code == 200
    pieces = (b"x" * 10_000 for _ in range(30))  # without a length
    response = httpx.post(f"{small}{CHAT}", content=pieces, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):  # as browsers send them to foreign sites
        response = httpx.post(f"{small}{CHAT}", content=json.dumps(HELLO), headers={"content-type": kind})
        assert response.status_code == 415
    for field, name, data, status in (
        ("file", "a", b"x" * 50_001, 413),
        ("file", "\u00e9" * 127, b"x", 200),
        ("file", "\u00e9" * 128, b"x", 400),
        ("file", "a", b"", 400),
        ("other", "a", b"x", 400),
    ):
        response = httpx.post(f"{small}/v1/files", files={field: (name, data)})
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["param"] == field


def test_a_body_that_never_ends_times_out() -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with serving(create_app(ServerSettings(endpoint="ipc:///nowhere", read_timeout=0.5))) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10 * PATIENCE) as connection:
            connection.sendall(head + b"Content-Length: 1000\r\n\r\n{")
            assert b" 408 " in connection.recv(4096)


def test_a_client_that_does_not_read_is_disconnected(drawling: HttpPipeline, caplog: pytest.LogCaptureFixture) -> None:
    body = {**HELLO, "messages": [{"role": "user", "content": "x" * 700}], "stream": True}
    data = json.dumps({**body, "modalities": ["text", "audio"]}).encode()
    with serving(create_app(ServerSettings(endpoint=drawling.endpoint, write_timeout=0.5))) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(10 * PATIENCE)
            connection.connect((host, int(port)))
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(data) + data
            )
            with OmniClient(drawling.endpoint) as client:
                until(lambda: client.describe().in_flight == 1, 20, "the request runs")
                until(lambda: client.describe().in_flight == 0, 20, "the pipeline is done with it")
            until(lambda: "the client does not read" in caplog.text, 20, "the server gives up")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # what is under way comes at once
            received = b""
            while piece := connection.recv(1 << 20):
                received += piece
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received


def test_uploads_touch_no_disk(echo_pipeline: HttpPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(create_app(ServerSettings(endpoint=echo_pipeline.endpoint))) as url:
        monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
        response = httpx.post(f"{url}/v1/files", files={"file": ("a", b"x" * 3_000_000)})
        assert (response.status_code, response.json()["bytes"]) == (200, 3_000_000)


COMPLETIONS, SPEECH, FILES = "/v1/completions", "/v1/audio/speech", "/v1/files"
MANY = 200_000
LONG = b"x" * (17 << 20)
START = b'{"model":"echo","messages":[{"role":"user","content":"hi"}],'
PART = b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n'


def keys(value: bytes) -> bytes:
    return b",".join(b'"k%d":%s' % (number, value) for number in range(MANY)) + b"}"


HOSTILE = [
    (CHAT, START + keys(b"1"), 413, "body_too_large"),
    (CHAT, b'{"messages":[' + b'{"role":"user","content":""},' * MANY, 413, "body_too_large"),
    (CHAT, START + b'"tools":' + b"[" * 10_000, 400, "invalid_value"),
    (CHAT, START + b'"functions":' + b"[" * 10_000, 400, "invalid_json"),
    (CHAT, START + b'"k":' + b"[" * 10_000, 400, "unknown_parameter"),
    (CHAT, b'{"messages":[{"role":"' + LONG[: 1 << 20] + b'"}]}', 400, "invalid_value"),
    (COMPLETIONS, b'{"prompt":[' + b'"",' * 10 * MANY + b'""]}', 413, "body_too_large"),
    (SPEECH, b'{"input":"' + LONG + b'"}', 413, "body_too_large"),
    (FILES, PART * 2000 + b"--B--", 400, "http_400"),
    (FILES, b"--B\r\n" + b"A: b\r\n" * MANY, 400, "http_400"),
]


def test_a_hostile_body_is_refused_briefly() -> None:
    """By a server whose pipeline does not answer: what gets past the checks of the body is a 503."""
    with serving(create_app(ServerSettings(endpoint="ipc:///nowhere"))) as url:
        for path, body, status, code in HOSTILE:
            kind = "multipart/form-data; boundary=B" if path == FILES else "application/json"
            response = httpx.post(f"{url}{path}", content=body, headers={"content-type": kind}, timeout=60)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code), body[:60]
            assert len(response.content) < 2000, "an error must not repeat what was sent"


def test_the_media_of_a_body_do_not_count_as_text(echo: HttpPipeline) -> None:
    content = b'[{"type":"input_audio","input_audio":{"data":"' + b"A" * len(LONG) + b'","format":"wav"}}]'
    body = b'{"model":"echo","messages":[{"role":"user","content":' + content + b"}]}"
    response = httpx.post(f"{echo.url}{CHAT}", content=body, headers={"content-type": "application/json"}, timeout=60)
    assert response.json()["error"]["code"] == "malformed_media"


RESPONSES = "/v1/responses"
LARGE = 600_000  # bytes, of a megabyte that all requests may hold


def test_clients_that_do_not_read_a_long_answer_hold_little_and_are_cut_off(drawling: HttpPipeline) -> None:
    spoken = {"model": "echo", "input": "x" * 600, "modalities": ["text", "audio"]}
    answer = httpx.post(f"{drawling.url}{RESPONSES}", json=spoken, timeout=60)
    path = f"{RESPONSES}/{answer.json()['id']}"
    assert httpx.get(f"{drawling.url}{path}").content == answer.content
    assert len(answer.content) > 7 << 20
    server = http_server(drawling)
    memory, files = server.memory_info().rss, server.num_fds()
    host, port = drawling.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as opened:
        for _ in range(20):
            connection = opened.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            connection.settimeout(10 * PATIENCE)
            assert connection.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
        assert server.memory_info().rss - memory < 4 * len(answer.content)
        until(lambda: server.num_fds() <= files, 20, "the connections are closed")


def test_what_is_kept_counts_as_if_it_were_in_the_body(drawling: HttpPipeline) -> None:
    recording = sound(LARGE / 2 / 16_000)
    with httpx.Client(base_url=drawling.url, timeout=60) as client:
        uploaded = client.post("/v1/files", files={"file": ("a.wav", recording)}).json()["id"]
        file = {"type": "file", "file": {"file_id": uploaded}}

        def chat(*parts: object) -> httpx.Response:
            content = [{"type": "text", "text": "hi"}, *parts]
            return client.post(CHAT, json={"model": "echo", "messages": [{"role": "user", "content": content}]})

        assert chat(file).status_code == 200
        assert chat(file, file).status_code == 503
        audio = {"data": base64.b64encode(recording).decode(), "format": "wav"}
        heard = [{"type": "input_text", "text": "hi"}, {"type": "input_audio", "input_audio": audio}]
        begun = [{"role": "user", "content": heard}]
        first = client.post(RESPONSES, json={"model": "echo", "input": begun}).json()

        def continued(*parts: object) -> httpx.Response:
            turn = {"role": "user", "content": [{"type": "input_text", "text": "and?"}, *parts]}
            return client.post(
                RESPONSES, json={"model": "echo", "input": [turn], "previous_response_id": first["id"], "store": False}
            )

        assert continued().status_code == 200
        refused = continued({"type": "input_file", "file_id": uploaded})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert chat(file).status_code == 200, "all is free again"


def test_the_servers_process_has_the_settings_of_the_yaml(drawling: HttpPipeline) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": "echo", "messages": [{"role": "user", "content": 3 * [part]}]}
    answer = httpx.post(f"{drawling.url}{CHAT}", json=body)
    assert (answer.status_code, "at most 2 are allowed" in answer.text) == (400, True), answer.text
    answer = httpx.post(f"{drawling.url}{CHAT}", json={**body, "user": "x" * (1 << 20)})
    assert (answer.status_code, f"limit of {1 << 20} bytes" in answer.text) == (413, True), answer.text
