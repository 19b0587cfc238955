"""Clients that break the protocol of a WebSocket, or leave in the middle: they are let go without a traceback."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator

import httpx
import pytest

from omni_actors.config.schema import HttpConfig
from scripts.fuzz_http import handshake
from tests.support.realtime import in_flight, metric
from tests.support.servers import HttpPipeline
from tests.support.waiting import PATIENCE, until

SAY = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one two three " * 20}]}
FAULTS = ("Traceback", "a request failed", "session failed", "ERROR")


@pytest.fixture
def quiet(slow: HttpPipeline) -> Iterator[HttpPipeline]:
    """20 tokens a second; no fault of the server may be in its log."""
    before = len(slow.log())
    yield slow
    until(lambda: metric(slow.url, "omni_realtime_sessions ") == 0)
    log = slow.log()[before:]
    assert not [fault for fault in FAULTS if fault in log], log[-5000:]


def connect(pipeline: HttpPipeline) -> socket.socket:
    address = httpx.URL(pipeline.url)
    return socket.create_connection((address.host, address.port), timeout=10 * PATIENCE)


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    received = b""
    while piece := connection.recv(1 << 16):
        received += piece
    return received


def message(**event: object) -> bytes:
    """A frame with an event; its mask of zeros changes nothing."""
    data = json.dumps(event).encode()
    return b"\x81\xfe" + struct.pack(">H", len(data)) + bytes(4) + data


@pytest.mark.parametrize(
    "frame",
    [b"\xff\x80\0\0\0\0", b"\x81\x02hi", b"\x81\x81\0\0\0\0\xff", b"\x82\xff" + b"\x7f" * 8],
    ids=["of no kind", "not masked", "no UTF-8", "too large"],
)
def test_a_client_that_breaks_the_protocol_ends_its_session_and_its_answer(quiet: HttpPipeline, frame: bytes) -> None:
    with connect(quiet) as connection:
        connection.sendall(handshake())
        received = b""
        while b"session.created" not in received:
            received += connection.recv(1 << 16)
        manual = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
        connection.sendall(message(type="session.update", session=manual))
        connection.sendall(message(type="conversation.item.create", item=SAY) + message(type="response.create"))
        until(lambda: in_flight(quiet.url) == 1)
        connection.sendall(frame)
        assert b"\x88" in rest_of(connection), "the frame that closes a WebSocket"
    until(lambda: in_flight(quiet.url) == 0)


def padded(head: bytes, size: int, line: int) -> bytes:
    """The head with headers of at most `line` bytes added, so that it has `size` bytes."""
    while (missing := size - len(head)) > 0:
        length = missing if missing <= line else min(line, missing - 10)
        head = head.replace(b"\r\n\r\n", b"\r\nX: " + b"x" * (length - 5) + b"\r\n\r\n")
    return head


@pytest.mark.parametrize("size", [0, HttpConfig().head_bytes], ids=["as it is", "as large as a head may be"])
def test_frames_that_do_not_wait_for_the_session_are_refused(quiet: HttpPipeline, size: int) -> None:
    """A head of the largest size is parsed alone, and what is behind it finds a WebSocket that is not accepted yet."""
    with connect(quiet) as connection:
        connection.sendall(padded(handshake(), size, line=8000) + message(type="response.create"))
        answer = rest_of(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"must wait for the answer" in answer


def test_a_request_that_no_websocket_takes_is_refused(quiet: HttpPipeline) -> None:
    with connect(quiet) as connection:
        connection.sendall(padded(handshake(), 20_000, line=20_000))
        answer = rest_of(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"no more than 8192 bytes" in answer


@pytest.mark.parametrize(
    ("wrong", "status"), [(b"/v1/realtime?model=gpt", b"404"), (b"/v1/realtime?a=b", b"400"), (b"/v1/models", b"404")]
)
def test_a_refused_session_is_no_error_of_the_server(quiet: HttpPipeline, wrong: bytes, status: bytes) -> None:
    """uvicorn takes a refusal for an application that has forgotten to answer."""
    with connect(quiet) as connection:
        connection.sendall(handshake().replace(b"/v1/realtime?model=echo", wrong))
        assert rest_of(connection).startswith(b"HTTP/1.1 " + status)


def test_text_that_is_no_utf8_after_the_end_of_a_session_is_discarded(quiet: HttpPipeline) -> None:
    """In one piece with what ended it: a frame that is none."""
    with connect(quiet) as connection:
        connection.sendall(handshake())
        received = b""
        while b"session.created" not in received:
            received += connection.recv(1 << 16)
        broken, ping = b"\x81\x81\0\0\0\0\xff", b"\x89\x80\0\0\0\0"
        connection.sendall(broken + ping + broken + ping)
        assert rest_of(connection).count(b"\x88") == 1


def test_no_websocket_begins_behind_a_request_that_is_not_answered(quiet: HttpPipeline) -> None:
    body = json.dumps({"model": "echo", "messages": [{"role": "user", "content": "one two " * 20}], "stream": True})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    post = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    with connect(quiet) as connection:
        connection.sendall(post)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + handshake())
        assert b" 101 " not in rest_of(connection)
    until(lambda: in_flight(quiet.url) == 0)
