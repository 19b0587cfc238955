"""Bodies made to cost much: they are refused briefly, whatever their size, and the server has nothing left of them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from omni_actors.http_server.app import create_app
from omni_actors.http_server.settings import ServerSettings
from tests.support.servers import HttpPipeline, serving

CHAT, COMPLETIONS, SPEECH, FILES = "/v1/chat/completions", "/v1/completions", "/v1/audio/speech", "/v1/files"
MANY = 200_000
LONG = b"x" * (17 << 20)
START = b'{"model":"echo","messages":[{"role":"user","content":"hi"}],'
PART = b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n'


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose pipeline does not answer: what gets past the checks of the body is a 503."""
    with serving(create_app(ServerSettings(endpoint="ipc:///nowhere"))) as found:
        yield found


def keys(value: bytes) -> bytes:
    return b",".join(b'"k%d":%s' % (number, value) for number in range(MANY)) + b"}"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
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
    ],
    ids=lambda given: repr(given)[:60],
)
def test_a_hostile_body_is_refused_briefly(url: str, path: str, body: bytes, status: int, code: str) -> None:
    kind = "multipart/form-data; boundary=B" if path == FILES else "application/json"
    response = httpx.post(f"{url}{path}", content=body, headers={"content-type": kind}, timeout=60)
    assert response.status_code == status, response.text[:500]
    assert response.json()["error"]["code"] == code
    assert len(response.content) < 2000, "an error must not repeat what was sent"


def test_the_media_of_a_body_do_not_count_as_text(echo: HttpPipeline) -> None:
    content = b'[{"type":"input_audio","input_audio":{"data":"' + b"A" * len(LONG) + b'","format":"wav"}}]'
    body = b'{"model":"echo","messages":[{"role":"user","content":' + content + b"}]}"
    response = httpx.post(f"{echo.url}{CHAT}", content=body, headers={"content-type": "application/json"}, timeout=60)
    assert response.json()["error"]["code"] == "malformed_media"
