"""WebSockets whose peers break the protocol, leave, or read nothing: they end, and quietly."""

from __future__ import annotations

import asyncio

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from omni_actors.http_server.refusals import refusal

CLOSE_SECONDS = 5.0  # for a WebSocket's client to read what was sent to it before its session ended
INVALID_DATA = 1007  # code of a WebSocket's end
EARLY = "A WebSocket's client must wait for the answer to its request before it sends anything."


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """Does not wait for a client that leaves the end of its session unread, and ends one that breaks the protocol."""

    def data_received(self, data: bytes) -> None:
        """Read frames. There can be none before the session is accepted: they would have no state to be read in."""
        if self.transport.is_closing():
            return
        if self.handshake_initiated and not self.handshake_complete:
            self._refuse(EARLY)
            return
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:  # which uvicorn leaves unanswered
            self._refuse(f"The request for a WebSocket is not valid: {self.conn.handshake_exc}.")

    def _refuse(self, message: str) -> None:
        self.transport.write(refusal(400, message, "invalid_http"))
        self.transport.close()

    def send_receive_event_to_app(self) -> None:
        """Pass a message on; one that is no UTF-8 ends the session, without uvicorn's traceback."""
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(INVALID_DATA)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    async def send(self, message: ASGISendEvent) -> None:
        """Send a message. Raises `ClientDisconnected` once the connection ends, whichever side ended it."""
        await self.writable.wait()
        if self.transport.is_closing():
            raise ClientDisconnected
        await super().send(message)

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Cut the connection soon after the application is done with it."""
        super().on_task_complete(task)
        self.loop.call_later(CLOSE_SECONDS, self.transport.abort)
