"""Bounds on connections: their number, slow handshakes and heads, and what WebSockets may cost.

uvicorn's strict parser (httptools) keeps all of a head or of a trailer before a key can be checked. Here bytes that
bring no part of a body are counted, so that a connection costs at most one head. Its other parser (h11) has such a
limit, but takes what a proxy may read otherwise: bare line feeds, folded lines, two lengths. uvicorn would also leave
TLS to asyncio, which counts no connections during the handshake and gives each a minute; so it begins here, on
connections that are counted.

uvicorn parses all frames of a read at once, answers pings among them, and keeps what is not complete. Here it is given
a little at a time, and nothing more while a message waits for the application; what it keeps is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
import types
from array import array
from asyncio.events import TimerHandle
from collections.abc import Coroutine, Generator
from http import HTTPStatus
from typing import Any, TypeVar

import httptools
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Close, CloseCode, Frame, Opcode

from omni_actors.errors import ErrorCode
from omni_actors.http_server.bodies import TOO_MANY
from omni_actors.http_server.errors import STOPPING, HttpError
from omni_actors.http_server.settings import ServerSettings, tls_context
from omni_actors.logs import get_logger
from omni_actors.sharing import Budget

logger = get_logger(__name__)
T = TypeVar("T")

RESERVED_FILES = 64  # for all but connections: logs, sockets to the pipeline, media that are fetched
TLS_CLOSE_SECONDS = 2.0  # for the peer to answer the end of its encrypted connection
LINGER_SECONDS = 1.0  # for a refused client to see why: to close while it sends would reset the connection


def bounded_protocol(settings: ServerSettings, connections: int) -> type[asyncio.Protocol]:
    """Make uvicorn's protocol class for one server, with at most `connections` at a time."""
    limits: dict[str, Any] = {
        "head_limit": settings.head_bytes,
        "head_seconds": settings.head_timeout,
        "connection_limit": min(settings.connections, connections),
        "tls": tls_context(settings),
        "idle": {},
    }
    return type("Protocol", (BoundedProtocol,), limits)  # uvicorn makes one for each connection, without arguments


def _begun(coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """Run a coroutine until it first waits: now, not at the loop's next turn. The result continues it."""
    steps = coroutine.__await__()
    first = next(steps)

    @types.coroutine
    def rest() -> Generator[Any, Any, T]:
        with contextlib.suppress(BaseException):  # `steps` raises it again
            yield first
        return (yield from steps)

    return rest()


class _Parser(httptools.HttpRequestParser):
    """Knows whether something stood behind a request to go on with another protocol, which uvicorn drops."""

    behind_upgrade = False

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.behind_upgrade = upgrade.args[0] < len(data)
            raise


class BoundedProtocol(HttpToolsProtocol):
    """Refuses what exceeds its limits, with 400, 408, 431 or 503, and closes the connection.

    A head lasts from the start of the connection (so it includes a TLS handshake), or the first byte after the request
    before, to its empty line. If there are too many connections, the one that has been without a request for longest is
    closed for the new one. A request before the answer to the one in front of it ends the connection: uvicorn would
    keep all that come in one read, and stop reading, so that it does not see that the client is gone.
    """

    head_limit: int
    head_seconds: float
    connection_limit: int
    tls: ssl.SSLContext | None
    idle: dict[BoundedProtocol, None]  # connections without a request, the oldest first

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser: _Parser = _Parser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self._in_head = True
        self._head_bytes = 0  # parsed since a head or a piece of a body came of it: a head, a trailer, sizes of chunks
        self._clock: TimerHandle | None = None
        self._refused = False
        self._handshake: asyncio.Task[asyncio.Transport | None] | None = None
        self._upgraded = False  # to a WebSocket, which has a protocol of its own
        self._early: list[bytes] = []  # what was decrypted before the handshake was known to be over

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for the connection, start the clock for its first head, and begin the TLS handshake, if any."""
        if self.tls is None:
            super().connection_made(transport)
        else:
            self.transport = transport
            self.connections.add(self)
            self._start_tls(self.tls)
        if len(self.connections) > self.connection_limit:
            if not self.idle:
                self._refuse(503, f"All {self.connection_limit} connections are in use: try again.", "overloaded")
                return
            oldest = next(iter(self.idle))
            oldest._refuse(408, "The server needs this connection for another client.", "head_timeout")
        self.idle[self] = None
        self._start_clock()

    def _start_tls(self, context: ssl.SSLContext) -> None:
        secured = self.loop.start_tls(
            self.transport,
            self,
            context,
            server_side=True,
            ssl_handshake_timeout=self.head_seconds,
            ssl_shutdown_timeout=TLS_CLOSE_SECONDS,
        )
        # It must take over before the loop reads anything.
        self._handshake = self.loop.create_task(_begun(secured), name="TLS handshake")
        self._handshake.add_done_callback(self._on_handshake)

    def _on_handshake(self, handshake: asyncio.Task[asyncio.Transport | None]) -> None:
        self._handshake = None
        error = asyncio.CancelledError() if handshake.cancelled() else handshake.exception()
        secured = None if error is not None else handshake.result()
        if secured is None or secured.is_closing() or self._refused:
            logger.debug("TLS handshake failed: %r", error)
            self.transport.abort()
            self.connection_lost(error if isinstance(error, Exception) else None)
            return
        super().connection_made(secured)
        early, self._early = self._early, []
        for data in early:
            self.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection. Idempotent."""
        self._leave_idle()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse no more of a head than it may have."""
        if self._handshake is not None:
            self._early.append(data)
            return
        while data and not (self._refused or self._upgraded or self.transport.is_closing()):
            if self._in_head and self._clock is None and not self._answering():
                self._start_clock()
            room = self.head_limit - self._head_bytes if self._in_head else len(data)
            piece, data = data[:room], data[room:]
            self._head_bytes += len(piece)
            super().data_received(piece)
            if self._head_bytes >= self.head_limit:
                message = f"The head and the trailer of a request are limited to {self.head_limit} bytes each."
                self._refuse(431, message, "head_too_large", linger=True)
        if data and isinstance(upgraded := self.transport.get_protocol(), BoundedWebSocket):
            upgraded.data_received(data)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection, which still counts, to a WebSocket, unless it carries something else, too."""
        if self.parser.behind_upgrade:
            self._refuse(400, EARLY, "invalid_http")
            return
        self._upgraded = True
        super().handle_websocket_upgrade()

    # -- callbacks of the parser

    def on_message_begin(self) -> None:
        """Begin a request, unless the one before it is not answered yet."""
        if self._answering():
            raise HttpError(400, "A request before the answer to the one in front of it.", code="invalid_http")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, but none of a trailer: it must not change what was checked."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the clock and run the request."""
        self._in_head = False
        self._head_bytes = 0
        self._leave_idle()
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a piece of the body on."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take what follows as the next head."""
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        """Mark the connection as one without a request, if that was its last."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self.idle[self] = None

    # -- the clock, and refusals

    def _start_clock(self) -> None:
        self._clock = self.loop.call_later(self.head_seconds, self._too_slow)

    def _leave_idle(self) -> None:
        self.idle.pop(self, None)
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _too_slow(self) -> None:
        self._clock = None
        message = f"The head of the request did not arrive completely within {self.head_seconds:g} s."
        self._refuse(408, message, "head_timeout")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; uvicorn calls this."""
        self._refuse(400, msg, "invalid_http")

    def shutdown(self) -> None:
        """Stop, as uvicorn asks: answer the request that is being made, and say so to who has not made the first."""
        if self.cycle is None and not self._upgraded:
            self._refuse(503, STOPPING, ErrorCode.STAGE_UNAVAILABLE, linger=True)
        else:
            super().shutdown()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str, code: str, linger: bool = False) -> None:
        """Answer in place of the application, and close; `linger` if the client may still be sending."""
        self._leave_idle()
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        logger.debug("connection refused: %d %s", status, message)
        if self._handshake is not None:  # its peer cannot read an answer yet
            self.transport.abort()
            return
        if self._answering():  # bytes written now would become part of that answer
            self.transport.close()
            return
        self.transport.write(refusal(status, message, code))
        if linger and self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()


BURST_SECONDS = 2.0  # of events that may come at once
CLOSE_SECONDS = 5.0  # for a WebSocket's client to read what was sent to it before its session ended
SLICE_BYTES = 4 << 10  # that are parsed at a time: at most 683 frames, some 10 ms
SMALL_BYTES = 1 << 10  # of a piece of a message, below which it costs more to parse than it brings
FREE_BYTES = 64 << 10  # of a message that may arrive beyond the budget: the session then refuses it and goes on
EARLY = "A WebSocket's client must wait for the answer to its request before it sends anything."


def bounded_websocket(settings: ServerSettings, bodies: Budget) -> type[BoundedWebSocket]:
    """Make uvicorn's WebSocket class for one server. What sessions send counts as bytes of `bodies` as it arrives."""
    limits = {"frames_per_second": settings.realtime_events_per_second, "bodies": bodies}
    return type("WebSocket", (BoundedWebSocket,), limits)  # uvicorn makes one for each connection


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """Ends a session that floods or breaks the protocol, and does not wait for a client that leaves its end unread.

    Whole messages are parsed as fast as the application takes them. Pings, pongs and small pieces of messages, which
    it does not see, end the session with 1008 if there are more than `frames_per_second`.
    """

    frames_per_second: float
    bodies: Budget

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pace = EventRate(self.frames_per_second, time.monotonic())
        self._pieces = bytearray()  # of a message that has not ended
        self._unread = b""  # what has come behind a message that waits for the application
        self._waiting_bytes = 0  # of that message
        self._ended = False

    # -- asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        """Read frames. There can be none before the session is accepted: they would have no state to be read in."""
        if self.transport.is_closing() or self._ended:
            return
        if self.handshake_initiated and not self.handshake_complete:
            self._refuse(EARLY)
            return
        self._unread += data
        self._parse()
        if self.conn.handshake_exc is not None and not self.handshake_initiated:  # which uvicorn leaves unanswered
            self._refuse(f"The request for a WebSocket is not valid: {self.conn.handshake_exc}.")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection and what has come of it."""
        super().connection_lost(exc)
        self._forget()

    # -- frames

    def _parse(self) -> None:
        """Parse what has come, up to the end of a message."""
        data, self._unread = self._unread, b""
        for start in range(0, len(data), SLICE_BYTES):
            if self.read_paused:
                self._unread = data[start:]
            if self._unread or self._ended or self.transport.is_closing():
                break
            super().data_received(data[start : start + SLICE_BYTES])
        self._hold()

    def _hold(self) -> None:
        """Count what is kept of the connection."""
        kept = (self.conn.reader.buffer, self._pieces, *self.frames, self._unread)
        size = sum(map(len, kept)) + self._waiting_bytes
        before = self.bodies.held_by(self)
        self.bodies.release(self)
        if size > max(before, FREE_BYTES) and not self.bodies.fits(size):
            self._end(CloseCode.TRY_AGAIN_LATER, TOO_MANY)
        elif size:  # an entry of nothing would outlive the connection
            self.bodies.take(self, size)

    def handle_events(self) -> None:
        """Handle frames up to the end of the session, or to one too many of those that the application does not see."""
        now = time.monotonic()
        for event in self.conn.events_received():
            if self._ended:
                return
            unseen = isinstance(event, Frame) and (self.close_sent or _small(event))
            if unseen and self._pace.wait(now):
                message = f"More than {self.frames_per_second:g} pings, pongs and pieces of messages a second."
                self._end(CloseCode.POLICY_VIOLATION, message)
                return
            self.conn.events = [event]
            super().handle_events()

    def handle_cont(self, event: Frame) -> None:
        """Append a piece to its message. Kept one by one, small ones would take many times their size."""
        if self.frames:
            self._pieces, self.frames = bytearray(self.frames[0]), []
        self._pieces += event.data
        if event.fin:
            self.frames, self._pieces = [bytes(self._pieces)], bytearray()
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        """Pass a message on, as bytes: a text could take four times as many. Invalid UTF-8 ends the session."""
        data = self.frames[0]
        if self.curr_msg_data_type == "text":
            try:
                data.decode()
            except UnicodeDecodeError:
                self._end(CloseCode.INVALID_DATA, "The message is not UTF-8.")
                return
        self.frames, self.curr_msg_data_type = [data], "bytes"
        self._waiting_bytes += 0 if self.close_sent else len(data)
        super().send_receive_event_to_app()

    # -- ends

    def _refuse(self, message: str) -> None:
        self.transport.write(refusal(400, message, "invalid_http"))
        self.transport.close()

    def _end(self, code: CloseCode, reason: str) -> None:
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    def handle_parser_exception(self) -> None:
        """Say why the session ends, read nothing more, and close in a moment."""
        if self._ended:
            return
        self._ended = True
        self._forget()
        close = self.conn.close_sent or Close(CloseCode.ABNORMAL_CLOSURE, "")
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.read_paused = False  # else `receive` would go on reading
        self.transport.pause_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.close_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _forget(self) -> None:
        self.frames, self._pieces, self._unread, self._waiting_bytes = [], bytearray(), b"", 0
        self.conn.reader.discard()
        self.bodies.release(self)

    # -- the application

    async def receive(self) -> ASGIReceiveEvent:
        """Wait for a message, and go on with what has come behind it."""
        message = await super().receive()
        if not self.read_paused:
            self._waiting_bytes = 0
            self._parse()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        """Send a message. Raises `ClientDisconnected` once the connection ends, whichever side ended it."""
        await self.writable.wait()
        if self.transport.is_closing() or self._ended:
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True  # uvicorn takes a refusal for none, and logs an error

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Cut the connection soon after the application is done with it."""
        super().on_task_complete(task)
        self.loop.call_later(CLOSE_SECONDS, self.transport.abort)


def _small(frame: Frame) -> bool:
    """Whether the application sees nothing of a frame, and it brings little."""
    if frame.opcode in (Opcode.PING, Opcode.PONG):
        return True
    return not frame.fin and len(frame.data) < SMALL_BYTES


class EventRate:
    """A bucket of tokens, one for each event.

    Args:
        rate: events per second in the long run.
        now: the time, in seconds of any clock.
    """

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._next = now - BURST_SECONDS  # when an event would come if all came at the rate

    def wait(self, now: float) -> float:
        """Count an event; returns the seconds for which no other one should be read."""
        self._next = max(self._next, now - BURST_SECONDS) + 1 / self._rate
        return max(0.0, self._next - now)


def refusal(status: int, message: str, code: str) -> bytes:
    """The bytes of an answer after which the connection is closed."""
    response = HttpError(status, message, code=code).response()
    headers = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items())
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{headers}connection: close\r\n\r\n"
    return head.encode() + bytes(response.body)
