"""Ends WebSockets whose peers flood, break the protocol, leave, or do not read.

uvicorn parses all frames of a read at once, answers pings among them, and keeps what is not complete. Here it is given
a little at a time, and nothing more while a message waits for the application; what it keeps is counted.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Close, CloseCode, Frame, Opcode

from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.shares import BodyBytes, Reservation

BURST_SECONDS = 2.0  # of events that may come at once
CLOSE_SECONDS = 5.0  # for a WebSocket's client to read what was sent to it before its session ended
LINGER_SECONDS = 1.0  # the same where the server ends it; to close while the client sends would reset the connection
SLICE_BYTES = 4 << 10  # that are parsed at a time: at most 683 frames, some 10 ms
SMALL_BYTES = 1 << 10  # of a piece of a message, below which it costs more to parse than it brings
FREE_BYTES = (
    64 << 10
)  # of a message that may arrive even when the budget is used up: the session then refuses it and goes on
REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
EARLY = "A WebSocket's client must wait for the answer to its request before it sends anything."


def bounded_websocket(settings: ServerSettings, bodies: BodyBytes) -> type[BoundedWebSocket]:
    """Make uvicorn's WebSocket class for one server. What sessions send counts as bytes of `bodies` as it arrives."""
    limits = {"frames_per_second": settings.realtime_events_per_second, "bodies": bodies}
    return type("WebSocket", (BoundedWebSocket,), limits)  # uvicorn makes one for each connection


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """Ends a session that floods or breaks the protocol, and does not wait for a client that leaves its end unread.

    Whole messages are parsed as fast as the application takes them. Pings, pongs and small pieces of messages, which
    it does not see, end the session with 1008 if there are more than `frames_per_second`.
    """

    frames_per_second: float
    bodies: BodyBytes

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pace = EventRate(self.frames_per_second, time.monotonic())
        self._held = Reservation(self.bodies)
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
        try:
            if size > max(self._held.size, FREE_BYTES):
                self._held.add(size - self._held.size)
        except HttpError as error:
            self._end(CloseCode.TRY_AGAIN_LATER, error.message)
        else:
            self._held.settle(size)

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
        self._held.release()

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
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\n{headers}connection: close\r\n\r\n"
    return head.encode() + bytes(response.body)
