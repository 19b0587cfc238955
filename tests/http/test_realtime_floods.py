"""Clients of realtime sessions that take more than their share, break the protocol, or leave in the middle."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from omni_actors.config.schema import HttpConfig
from omni_actors.http_server.app import create_app
from omni_actors.http_server.connections import bounded_websocket
from omni_actors.http_server.settings import ServerSettings
from omni_actors.sharing import Budget
from scripts.fuzz_http import ACCEPTED, handshake
from scripts.fuzz_websocket import CLOSE, CONTINUATION, PING, PONG, TEXT, frame, frames_of_server
from tests.support.http_servers import http_server
from tests.support.realtime import MANUAL, in_flight, metric
from tests.support.servers import HttpPipeline, serving
from tests.support.waiting import PATIENCE, until

SAY = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one two three " * 20}]}
FAULTS = ("Traceback", "a request failed", "session failed", "ERROR")
TRY_AGAIN_LATER, POLICY_VIOLATION = 1013, 1008
MEBIBYTE = 1 << 20


def connected(url: str, source: str = "127.0.0.1") -> socket.socket:
    address = httpx.URL(url)
    return socket.create_connection((address.host, address.port), 10 * PATIENCE, (source, 0))


class Peer:
    """The client of one session, frame by frame."""

    def __init__(self, url: str, source: str = "127.0.0.1") -> None:
        self.socket = connected(url, source)
        self.socket.sendall(handshake())
        self._received = b""
        self.head = self._until(b"\r\n\r\n")
        if self.head.startswith(ACCEPTED):
            self.event("session.created")

    def _until(self, end: bytes) -> bytes:
        while end not in self._received:
            piece = self.socket.recv(1 << 16)
            assert piece, f"the connection ended before {end!r}: {self._received[-500:]!r}"
            self._received += piece
        found, self._received = self._received.split(end, 1)[0] + end, self._received.split(end, 1)[1]
        return found

    def send(self, **event: Any) -> None:
        self.socket.sendall(frame(TEXT, json.dumps(event).encode()))

    def event(self, kind: str) -> dict[str, Any]:
        while True:
            for opcode, content in frames_of_server(self._received):
                self._received = self._received[self._received.index(content) + len(content) :]
                if opcode == TEXT and (found := json.loads(content))["type"] == kind:
                    event: dict[str, Any] = found
                    return event
            piece = self.socket.recv(1 << 16)
            assert piece, f"the session ended before {kind}"
            self._received += piece

    def end(self) -> tuple[int, str]:
        """Code and reason with which the server ends the session."""
        while piece := self.socket.recv(1 << 20):
            self._received = (self._received + piece)[-MEBIBYTE:]
        (content,) = [content for opcode, content in frames_of_server(self._received) if opcode == CLOSE]
        return int.from_bytes(content[:2], "big"), content[2:].decode()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


@pytest.mark.parametrize(
    ("before", "flood"),
    [
        (b"", frame(PING)),
        (b"", frame(PONG, b"x" * 20)),
        (frame(TEXT, first=0), frame(CONTINUATION, first=0)),
        (frame(TEXT, first=0), frame(CONTINUATION, b"x", first=0)),
    ],
    ids=["pings", "pongs", "empty pieces", "pieces of a byte"],
)
def test_a_flood_of_small_frames_costs_its_sender_the_session_and_others_nothing(
    echo: HttpPipeline, before: bytes, flood: bytes
) -> None:
    """What the server computes for it is compared: how soon others are answered depends on the machine."""
    server = http_server(echo)
    used = sum(server.cpu_times()[:2])
    with Peer(echo.url) as peer:
        peer.socket.sendall(before)
        sender = threading.Thread(target=_send_all, args=(peer.socket, 500_000 * flood))
        sender.start()
        code, reason = peer.end()
        assert httpx.get(f"{echo.url}/health", timeout=10 * PATIENCE).status_code == 200
        sender.join()
    assert code == POLICY_VIOLATION
    assert reason == "More than 500 pings, pongs and pieces of messages a second."
    assert sum(server.cpu_times()[:2]) - used < 1.0, "500,000 frames are some 6 s of work"


def _send_all(made: socket.socket, data: bytes) -> None:
    try:
        made.sendall(data)
    except OSError:
        return  # the server has had enough


def test_a_message_in_many_pieces_with_pings_between_them_is_taken(echo: HttpPipeline) -> None:
    """As clients with small buffers send a long recording."""
    event = {"type": "input_audio_buffer.append", "audio": base64.b64encode(bytes(3_000_000)).decode()}
    data = json.dumps(event).encode()
    pieces = [data[start : start + 1024] for start in range(0, len(data), 1024)]
    assert len(pieces) > 3000
    with Peer(echo.url) as peer:
        peer.send(type="session.update", session=MANUAL)
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            ping = frame(PING, b"still here") if index % 100 == 0 else b""
            peer.socket.sendall(ping + frame(CONTINUATION if index else TEXT, piece, first=0x80 if last else 0))
        peer.send(type="input_audio_buffer.commit")
        peer.event("input_audio_buffer.committed")


def test_messages_that_have_not_ended_count_as_bytes_of_all_requests(echo: HttpPipeline) -> None:
    """In one frame or in pieces. Who cannot have more is told so; the end of a connection gives its bytes back."""
    settings = ServerSettings(endpoint=echo.endpoint, body_bytes=2 * MEBIBYTE, bodies_bytes=5 * MEBIBYTE // 2)
    with counted_sessions(settings) as (url, bodies):
        with Peer(url) as first, Peer(url) as second, Peer(url) as third:
            first.socket.sendall(frame(TEXT, bytes(MEBIBYTE), size=2 * MEBIBYTE))
            until(lambda: bodies.used >= MEBIBYTE, what="the bytes of a frame are counted")
            second.socket.sendall(frame(TEXT, first=0) + 1024 * frame(CONTINUATION, bytes(1024), first=0))
            until(lambda: bodies.used >= 2 * MEBIBYTE, what="the bytes of pieces are counted")
            third.socket.sendall(frame(TEXT, bytes(MEBIBYTE), size=2 * MEBIBYTE))
            assert third.end() == (TRY_AGAIN_LATER, "The server holds too many bytes of other requests: try again.")
            assert 2 * MEBIBYTE <= bodies.used <= bodies.limit
        until(lambda: bodies.used == 0, what="the bytes are given back")


@contextmanager
def counted_sessions(settings: ServerSettings) -> Iterator[tuple[str, Budget]]:
    """A server, and the bytes that its requests hold."""
    bodies = Budget(settings.bodies_bytes)
    app = create_app(settings, bodies=bodies)
    with serving(app, ws=bounded_websocket(settings, bodies), ws_max_size=settings.body_bytes) as url:
        yield url, bodies


def test_an_address_leaves_sessions_to_others(echo: HttpPipeline) -> None:
    """The last of four places is for an address that has none."""
    with (
        counted_sessions(ServerSettings(endpoint=echo.endpoint, realtime_sessions=4)) as (url, _),
        ExitStack() as stack,
    ):
        for _ in range(3):
            assert stack.enter_context(Peer(url)).head.startswith(ACCEPTED)
        with Peer(url) as refused:
            assert refused.head.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after" in refused.head
        with Peer(url, source="127.0.0.2") as other:
            assert other.head.startswith(ACCEPTED)
            with Peer(url, source="127.0.0.3") as refused:
                assert refused.head.startswith(b"HTTP/1.1 429 "), "all are taken"


@pytest.fixture
def quiet(slow: HttpPipeline) -> Iterator[HttpPipeline]:
    """20 tokens a second; no fault of the server may be in its log."""
    before = len(slow.log())
    yield slow
    until(lambda: metric(slow.url, "omni_realtime_sessions ") == 0)
    log = slow.log()[before:]
    assert not [fault for fault in FAULTS if fault in log], log[-5000:]


@pytest.mark.parametrize(
    "wrong",
    [b"\xff\x80\0\0\0\0", b"\x81\x02hi", b"\x81\x81\0\0\0\0\xff", b"\x82\xff" + b"\x7f" * 8],
    ids=["of no kind", "not masked", "no UTF-8", "too large"],
)
def test_a_client_that_breaks_the_protocol_ends_its_session_and_its_answer(quiet: HttpPipeline, wrong: bytes) -> None:
    with Peer(quiet.url) as peer:
        peer.send(type="session.update", session=MANUAL)
        peer.send(type="conversation.item.create", item=SAY)
        peer.send(type="response.create")
        until(lambda: in_flight(quiet.url) == 1)
        peer.socket.sendall(wrong)
        peer.end()
    until(lambda: in_flight(quiet.url) == 0)


def padded(head: bytes, size: int, line: int) -> bytes:
    """The head with headers of at most `line` bytes added, so that it has `size` bytes."""
    while (missing := size - len(head)) > 0:
        length = missing if missing <= line else min(line, missing - 10)
        head = head.replace(b"\r\n\r\n", b"\r\nX: " + b"x" * (length - 5) + b"\r\n\r\n")
    return head


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_handshakes_that_are_refused_are_no_errors_of_the_server(quiet: HttpPipeline) -> None:
    """A head of the largest size is parsed alone, and what is behind it finds a WebSocket that is not accepted yet.

    uvicorn takes a refusal for an application that has forgotten to answer.
    """
    early, largest = frame(TEXT, b'{"type": "response.create"}'), HttpConfig().head_bytes
    right = b"/v1/realtime?model=echo"
    for sent, status, words in (
        (handshake() + early, b"400", b"must wait for the answer"),
        (padded(handshake(), largest, line=8000) + early, b"400", b"must wait for the answer"),
        (padded(handshake(), 20_000, line=20_000), b"400", b"no more than 8192 bytes"),
        (handshake().replace(right, b"/v1/realtime?model=gpt"), b"404", b""),
        (handshake().replace(right, b"/v1/realtime?a=b"), b"400", b""),
        (handshake().replace(right, b"/v1/models"), b"404", b""),
    ):
        with connected(quiet.url) as connection:
            connection.sendall(sent)
            answer = rest_of(connection)
        assert answer.startswith(b"HTTP/1.1 " + status), answer
        assert words in answer
    with Peer(quiet.url) as peer:  # text that is no UTF-8 after the end of a session, in one piece with what ended it
        peer.socket.sendall(2 * (b"\x81\x81\0\0\0\0\xff" + frame(PING)))
        peer.end()


def test_no_websocket_begins_behind_a_request_that_is_not_answered(quiet: HttpPipeline) -> None:
    body = json.dumps({"model": "echo", "messages": [{"role": "user", "content": "one two " * 20}], "stream": True})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    post = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    with connected(quiet.url) as connection:
        connection.sendall(post)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + handshake())
        assert b" 101 " not in rest_of(connection)
    until(lambda: in_flight(quiet.url) == 0)
