"""Bounds on connections: how many there are, how slow a TLS handshake and how large and slow a head may be.

uvicorn's parser keeps all of a head before a key can be checked. Here bytes are counted before they are
parsed, so that a connection costs at most one head. uvicorn would also leave TLS to asyncio, which counts no
connections during the handshake and gives each a minute; so it begins here, on connections that are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import types
from array import array
from asyncio.events import TimerHandle
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from omni_actors.errors import ErrorCode
from omni_actors.http_server.bounded_websocket import EARLY, BoundedWebSocket, refusal
from omni_actors.http_server.errors import STOPPING
from omni_actors.http_server.settings import ServerSettings, tls_context
from omni_actors.logs import get_logger

logger = get_logger(__name__)
T = TypeVar("T")

RESERVED_FILES = 64  # for all but connections: logs, sockets to the pipeline, media that are fetched
TLS_CLOSE_SECONDS = 2.0  # for the peer to answer the end of its encrypted connection
LINGER_SECONDS = 1.0  # for which what a refused client still sends is read and discarded, so that it sees why
BEHIND_BYTES = 65_536  # that are read and discarded behind a request that is not answered yet


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
    closed for the new one. A request that is sent before the one in front of it is answered gets no answer: the
    connection closes after that one. uvicorn would stop reading until then, and not see that the client is gone.
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
        self._behind: int | None = None  # bytes discarded behind the request that is being answered
        self._in_head = True
        self._head_bytes = self._trailer_bytes = 0
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
        if self._behind is not None:
            self._behind += len(data)
            if self._behind > BEHIND_BYTES:
                self.transport.close()
            return
        while data and self._behind is None and not (self._refused or self._upgraded or self.transport.is_closing()):
            if not self._in_head:
                super().data_received(data)
                return
            if self._clock is None:
                self._start_clock()
            room = self.head_limit - self._head_bytes
            piece, data = data[:room], data[room:]
            self._head_bytes += len(piece)
            super().data_received(piece)
            if self._behind is None and self._in_head and self._head_bytes >= self.head_limit:
                message = f"The head of a request is limited to {self.head_limit} bytes."
                self._refuse(431, message, "head_too_large", linger=True)
        if data and isinstance(upgraded := self.transport.get_protocol(), BoundedWebSocket):
            upgraded.data_received(data)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection, which still counts, to a WebSocket, unless it carries something else, too."""
        if self._answering():
            return
        if self.parser.behind_upgrade:
            self._refuse(400, EARLY, "invalid_http")
            return
        self._upgraded = True
        super().handle_websocket_upgrade()

    # -- callbacks of the parser

    def on_message_begin(self) -> None:
        """Begin a request, or discard it if the one before it is not answered yet."""
        if self._answering():
            self._behind = 0
            self.cycle.keep_alive = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. The trailer of a chunked body, which nothing here reads, is only counted."""
        if self._in_head:
            super().on_header(name, value)
            return
        self._trailer_bytes += len(name) + len(value)
        if self._trailer_bytes > self.head_limit:
            message = f"The trailer of a request is limited to {self.head_limit} bytes."
            self._refuse(431, message, "head_too_large", linger=True)

    def on_headers_complete(self) -> None:
        """Stop the clock and run the request."""
        if self._behind is not None:
            return
        self._in_head = False
        self._head_bytes = self._trailer_bytes = 0
        self._leave_idle()
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a piece of the body on."""
        if self._behind is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Take what follows as the next head."""
        if self._behind is None:
            super().on_message_complete()
            self._in_head = True

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
        if self._answering():  # reading may be paused, so that the rest of the next head cannot arrive
            self._start_clock()
            return
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
            # To close while the client still sends would reset the connection, and the answer could be lost.
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()
