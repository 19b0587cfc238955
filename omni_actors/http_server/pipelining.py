"""Requests in a row on one connection, which are answered one after the other.

uvicorn reads no more while one of them waits, and tells only the newest that the connection has ended. An earlier one
would be computed to its end for a client that is gone.
"""

from __future__ import annotations

from array import array
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from omni_actors.logs import get_logger

logger = get_logger(__name__)

WAITING_BYTES = 65_536  # of the bodies that wait for the answer to an earlier request


class Parser(httptools.HttpRequestParser):
    """Knows whether something stood behind a request to go on with another protocol, which uvicorn drops."""

    behind_upgrade = False

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        """Parse a piece of the connection. Raises httptools' errors."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.behind_upgrade = upgrade.args[0] < len(data)
            raise


class PipelinedProtocol(HttpToolsProtocol):
    """Ends the request that is being answered when the connection ends, whatever has arrived behind it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser: Parser = Parser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self._answered: RequestResponseCycle | None = None
        self._waiting_bytes = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered."""
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def on_headers_complete(self) -> None:
        """Run the request or let it wait, and read on in both cases: the end of a connection has to be read, too."""
        waiting, newest = len(self.pipeline), self.cycle
        super().on_headers_complete()
        if len(self.pipeline) > waiting:
            self.flow.resume_reading()
        elif self.cycle is not newest:  # it is if this was no request, but the end of all of them: an upgrade
            self._answered = self.cycle

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body. Those that wait are bounded, because no one has asked for them yet."""
        super().on_body(body)
        if self.cycle is not self._answered:
            self._waiting_bytes += len(body)
            if self._waiting_bytes > WAITING_BYTES and not self.transport.is_closing():
                logger.debug("connection closed: over %d bytes wait for the answer to a request", WAITING_BYTES)
                self.transport.close()

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if following is not None:
            self._answered = following
        if not self.pipeline:
            self._waiting_bytes = 0
