"""Clients of realtime sessions that send more, hold more or open more than their share; what the others see of it."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import psutil
import pytest

from omni_actors.http_server.app import create_app
from omni_actors.http_server.connections import bounded_websocket
from omni_actors.http_server.settings import ServerSettings
from omni_actors.sharing import Budget
from scripts.fuzz_http import ACCEPTED, handshake
from scripts.fuzz_websocket import CLOSE, CONTINUATION, PING, PONG, TEXT, frame, frames_of_server
from tests.support.processes import processes_titled
from tests.support.servers import HttpPipeline, serving
from tests.support.waiting import PATIENCE, until

TRY_AGAIN_LATER, POLICY_VIOLATION = 1013, 1008
MEBIBYTE = 1 << 20


class Peer:
    """The client of one session, frame by frame."""

    def __init__(self, url: str, source: str = "127.0.0.1") -> None:
        address = httpx.URL(url)
        self.socket = socket.create_connection((address.host, address.port), 10 * PATIENCE, (source, 0))
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

    def event(self, kind: str) -> dict[str, Any]:
        """The first event of a kind that comes."""
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


def server_of(pipeline: HttpPipeline) -> psutil.Process:
    (pid,) = processes_titled("omni:http", pipeline.process.pid)
    return psutil.Process(pid)


# -- frames -----------------------------------------------------------------------------------------------------------


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
    server = server_of(echo)
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
    update = {"type": "session.update", "session": {"type": "realtime", "audio": {"input": {"turn_detection": None}}}}
    with Peer(echo.url) as peer:
        peer.socket.sendall(frame(TEXT, json.dumps(update).encode()))
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            ping = frame(PING, b"still here") if index % 100 == 0 else b""
            peer.socket.sendall(ping + frame(CONTINUATION if index else TEXT, piece, first=0x80 if last else 0))
        peer.socket.sendall(frame(TEXT, b'{"type": "input_audio_buffer.commit"}'))
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


# -- sessions ---------------------------------------------------------------------------------------------------------


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
