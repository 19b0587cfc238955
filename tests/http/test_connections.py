"""Bounds before a request is read: heads, trailers, connections, bodies that arrive, pages of other sites."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from omni_actors.http_server.app import create_app
from omni_actors.http_server.connections import bounded_protocol
from omni_actors.http_server.settings import ServerSettings
from tests.support.servers import HttpPipeline, serving
from tests.support.waiting import PATIENCE, until
from tests.support.zmtp import closed

GET = b"GET /v1/files HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
HEAD_BYTES = 8192


@contextlib.contextmanager
def server(connections: int = 64, **limits: object) -> Iterator[tuple[str, int]]:
    """A server whose pipeline does not answer; gives its host and port."""
    settings = ServerSettings(endpoint="ipc:///nowhere", head_bytes=HEAD_BYTES, **limits)
    protocol = bounded_protocol(settings, connections)
    with serving(create_app(settings), http=protocol, timeout_graceful_shutdown=1) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with server(head_timeout=30.0) as found:
        yield found


def connect(address: tuple[str, int], sent: bytes = b"") -> socket.socket:
    made = socket.create_connection(address, timeout=10 * PATIENCE)
    made.sendall(sent)
    return made


def next_answer(made: socket.socket) -> tuple[int, str]:
    """Status and error code of the next answer, whose body is a JSON object."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while not received.endswith(b"}") and (piece := made.recv(65536)):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body).get("error", {}).get("code", "")


def answer_to(address: tuple[str, int], sent: bytes) -> tuple[int, str]:
    with connect(address) as made:
        with contextlib.suppress(ConnectionError):  # it closes while we still send
            made.sendall(sent)
        return next_answer(made)


def test_a_head_has_a_limit(address: tuple[str, int]) -> None:
    many, long = b"A: b\r\n" * HEAD_BYTES, 10 * HEAD_BYTES
    for head in (GET + many, GET + b"A: " + b"b" * long, b"GET /" + b"a" * long, GET + b"A" * long):
        assert answer_to(address, head) == (431, "head_too_large")
    padding = HEAD_BYTES - len(GET) - len(b"A: \r\n\r\n") - 1
    assert answer_to(address, GET + b"A: " + b"b" * padding + b"\r\n\r\n")[0] == 200, "just within it"
    with connect(address, GET + b"\r\n") as made:
        assert next_answer(made)[0] == 200
        with contextlib.suppress(ConnectionError):
            made.sendall(GET + b"A: " + b"b" * long)
        assert next_answer(made)[0] == 431, "a later request"


@pytest.mark.parametrize(
    ("start", "more"),
    [(b"0\r\n", b"A: b\r\n"), (b"0\r\n", b"A"), (b"0\r\nA: ", b"b"), (b"1;", b"a"), (b"", b"0")],
    ids=["trailer", "name in a trailer", "value in a trailer", "extension of a chunk", "size of a chunk"],
)
@pytest.mark.parametrize("path", [b"/v1/files", b"/nothing"], ids=["read", "answered before"])
def test_what_has_no_end_ends_the_connection(address: tuple[str, int], path: bytes, start: bytes, more: bytes) -> None:
    """The parser would keep names and values until they end."""
    sent = POST.replace(b"/v1/files", path) + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n" + start
    with connect(address, sent) as made:
        with contextlib.suppress(ConnectionError):
            for _ in range(64):  # more than the buffers of both ends take
                made.sendall(more * (1 << 18))
        assert closed(made)


def test_a_trailer_is_read_and_changes_no_header(address: tuple[str, int]) -> None:
    sent = POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nOrigin: http://evil.example\r\n\r\n"
    assert answer_to(address, sent) == (400, "http_400"), "no multipart form, but it was read"


def test_a_request_before_the_answer_to_the_one_in_front_of_it_ends_the_connection(address: tuple[str, int]) -> None:
    models = GET.replace(b"/v1/files", b"/v1/models")  # for which the pipeline is asked, which does not answer
    for sent in ([models + b"\r\n" + GET + b"\r\n"], [models + b"\r\n", b"\r\n", GET]):
        with connect(address) as made:
            received = b"nothing yet"
            with contextlib.suppress(ConnectionError):
                for piece in sent:
                    made.sendall(piece)
                received = made.recv(65536)
        assert received == b"", "it is closed before the first of them is answered"


def test_what_is_not_http_is_refused_in_the_format_of_all_errors(address: tuple[str, int]) -> None:
    for sent in (b"\x16\x03\x01 this is TLS\r\n\r\n", GET + b"Host: evil.example\r\n\r\n"):
        assert answer_to(address, sent) == (400, "invalid_http")


def test_a_request_for_another_protocol_is_answered_as_any_other(address: tuple[str, int]) -> None:
    for protocol in (b"websocket", b"h2c"):
        upgrade = b"Connection: Upgrade, close\r\nUpgrade: " + protocol + b"\r\nSec-WebSocket-Version: 13\r\n\r\n"
        assert answer_to(address, GET + upgrade)[0] == 200


CHUNKED = b"Transfer-Encoding: chunked\r\n"
LAST_CHUNK = b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "start",
    [
        POST + b"Content-Length: 4\r\n" + CHUNKED + LAST_CHUNK,
        POST + CHUNKED + b"Content-Length: 4\r\n" + LAST_CHUNK,
        POST + b"Content-Length: 0\r\nContent-Length: 5\r\n\r\nhello",
        POST + b"Content-Length: 5, 5\r\n\r\nhello",
        POST + b"Content-Length: +5\r\n\r\nhello",
        POST + b"Content-Length: 0x5\r\n\r\nhello",
        POST + b"Content-Length: 99999999999999999999999\r\n\r\nhello",
        POST + b"Transfer-Encoding: xchunked\r\n" + LAST_CHUNK,
        POST + b"Transfer-Encoding: chunked, identity\r\n" + LAST_CHUNK,
        POST + b"Transfer-Encoding : chunked\r\n" + LAST_CHUNK,
        POST + CHUNKED + b"Transfer-Encoding: identity\r\n" + LAST_CHUNK,
        POST + b"Transfer-Encoding:\r\n chunked\r\n" + LAST_CHUNK,
        POST.replace(b"1.1", b"1.0") + CHUNKED + LAST_CHUNK,
        POST + CHUNKED + b"\r\n5\nhello\r\n0\r\n\r\n",
        POST + CHUNKED + b"\r\n+5\r\nhello\r\n0\r\n\r\n",
        POST + CHUNKED + b"\r\nfffffffffffffffff\r\nhello\r\n0\r\n\r\n",
        POST + CHUNKED + b"\r\n5\r\nhelloXX0\r\n\r\n",
        GET.replace(b"\r\n", b"\n") + b"\n",
        GET + b"A: b\rC: d\r\n\r\n",
        GET + b"A: b\r\n c\r\n\r\n",
        GET + b"A: b\0c\r\n\r\n",
    ],
)
def test_what_a_proxy_might_read_otherwise_is_refused(address: tuple[str, int], start: bytes) -> None:
    """With two ideas of where a request ends, a proxy could be made to pass on one that it never saw."""
    with connect(address, start + b"GET /style.css HTTP/1.1\r\nHost: localhost\r\n\r\n") as made:
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := made.recv(65536):
                received += piece
    assert b"HTTP/1.1 200" not in received


def test_a_head_that_does_not_arrive_is_given_up() -> None:
    with server(head_timeout=1.0) as address:
        with connect(address) as silent, connect(address, GET) as half:
            assert next_answer(silent)[1] == "head_timeout"
            assert next_answer(half)[1] == "head_timeout"
        with connect(address, GET + b"\r\n") as made:
            assert next_answer(made)[0] == 200
            made.sendall(GET)  # half of the next one
            assert next_answer(made)[1] == "head_timeout"


def test_a_new_client_takes_the_place_of_one_that_has_sent_no_request() -> None:
    with server(connections=4, head_timeout=30.0) as address:
        half = [connect(address, GET) for _ in range(12)]
        status, _ = answer_to(address, GET + b"\r\n")
        assert status == 200
        for made in half[:8]:
            assert closed(made)
            made.close()
        for made in half[8:]:
            made.close()


def test_a_connection_with_a_request_keeps_its_place() -> None:
    with server(connections=2, read_timeout=30.0) as address:
        busy = [connect(address, POST + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n") for _ in range(2)]
        for made in busy:
            assert made.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"  # its body is awaited
        assert answer_to(address, GET + b"\r\n") == (503, "overloaded")
        with connect(address, GET + b"\r\n") as refused:
            head = refused.recv(65536).lower()
        assert b"\r\nretry-after: 1\r\n" in head
        assert b"service_unavailable_error" in head
        for made in busy:
            made.sendall(b"hello")
            assert next_answer(made)[0] == 400  # no multipart form, but it was read
            made.close()


def test_a_server_that_stops_says_so_to_everyone_without_an_answer() -> None:
    with contextlib.ExitStack() as clients:
        with server(read_timeout=30.0) as address:
            silent, half = (clients.enter_context(connect(address, sent)) for sent in (b"", GET))
            waiting = clients.enter_context(
                connect(address, POST + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n")
            )
            assert waiting.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"  # its body is awaited
        for client in (silent, half, waiting):
            assert next_answer(client) == (503, "stage_unavailable")


def test_bodies_that_arrive_count_towards_the_limit_of_all() -> None:
    with server(body_bytes=40_000, bodies_bytes=100_000, read_timeout=30.0) as address:
        held = [connect(address, POST + b"Content-Length: 40000\r\n\r\n" + b"x" * 39_000) for _ in range(2)]
        sent = POST + b"Content-Length: 30000\r\n\r\n" + b"x" * 30_000
        until(lambda: answer_to(address, sent) == (503, "overloaded"), 10, "the bodies to be counted")
        for made in held:
            made.close()
        until(lambda: answer_to(address, sent)[0] == 400, 10, "what they held to be given back")


def test_a_page_of_another_site_cannot_use_a_server_without_a_key(address: tuple[str, int]) -> None:
    url = f"http://{address[0]}:{address[1]}"
    evil = {"origin": "http://evil.example"}
    for headers, status in (
        (evil, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:1"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({**evil, "sec-fetch-site": "same-origin"}, 403),
        ({}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": url, "sec-fetch-site": "same-origin"}, 200),
    ):
        assert httpx.post(f"{url}/v1/files", files={"file": b"x"}, headers=headers).status_code == status, headers
        assert httpx.get(f"{url}/v1/files", headers=headers).status_code == status, headers
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert httpx.get(f"{url}/", headers=link).status_code == 200, "a link may lead to the page"
    friend = {"origin": "http://friend.example", "authorization": "Bearer secret", "sec-fetch-site": "cross-site"}
    for settings in ({"cors_origins": ["http://friend.example"]}, {"api_key": "secret"}, {"cors_origins": ["*"]}):
        with server(**settings) as (host, port):
            answer = httpx.post(f"http://{host}:{port}/v1/files", files={"file": b"x"}, headers=friend)
            assert answer.status_code == 200, settings


def test_the_server_of_a_pipeline_has_these_bounds(echo: HttpPipeline) -> None:
    host, port = echo.url.removeprefix("http://").split(":")
    assert answer_to((host, int(port)), GET + b"A: b\r\n" * 100_000) == (431, "head_too_large")
