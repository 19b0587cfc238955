"""Middleware for every request: checks of host, origin and key, a bound on bytes, and one log line."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from omni_actors.errors import ErrorCode
from omni_actors.host.addresses import is_loopback
from omni_actors.http_server.errors import STOPPING, HttpError
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.shares import RESERVATION, BodyBytes, Reservation
from omni_actors.http_server.status import PAGE_FILES
from omni_actors.logs import get_logger
from omni_actors.protocol.fields import TRACEPARENT

logger = get_logger(__name__)

OPEN_PATHS = frozenset({*PAGE_FILES, "/health"})  # no key needed: they hold no secrets and cause no work
VALID_TRACEPARENT = re.compile(TRACEPARENT)
KEY_SUBPROTOCOL = "openai-insecure-api-key."  # as OpenAI's pages send it
SWITCHING_PROTOCOLS = 101
BEGINNINGS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
PIECE_BYTES = 65_536  # of an answer that are written at once
POLLED_PATHS = frozenset({"/v1/status", "/health", "/metrics"})  # logged at debug only


class RequestMiddleware:
    """ASGI middleware around the whole application.

    Puts `request_id` (for logs and the response's `x-request-id`) and `traceparent` (the caller's W3C trace context if
    it is valid, else `None`) into the scope's state.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, bodies: BodyBytes | None = None) -> None:
        self._app = app
        self._settings = settings
        self._bodies = bodies or BodyBytes(settings.bodies_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or WebSocket; lifespan events pass through untouched."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = uuid.uuid4().hex
        traceparent = headers.get("traceparent", "").strip()
        scope.setdefault("state", {}).update(
            request_id=request_id, traceparent=traceparent if VALID_TRACEPARENT.match(traceparent) else None
        )
        began = time.monotonic()
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] in BEGINNINGS:
                status = message.get("status", SWITCHING_PROTOCOLS)
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._check_and_run(scope, headers, receive, answer)
        except asyncio.CancelledError:  # by uvicorn, at the end of the time that a stop gives to requests
            if status or scope["type"] == "websocket":
                raise
            await HttpError(503, STOPPING, code=ErrorCode.STAGE_UNAVAILABLE).response()(scope, receive, answer)
        finally:
            quiet = scope["path"] in POLLED_PATHS and status < 500
            level, method = logging.DEBUG if quiet else logging.INFO, scope.get("method", "WEBSOCKET")
            what = (method, _printable(scope["path"][:200]), status, time.monotonic() - began)
            logger.log(level, "%s %s %d in %.3f s", *what, extra={"request_id": request_id})

    async def _check_and_run(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        reservation = Reservation(self._bodies)
        RESERVATION.set(reservation)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                reservation.release()  # first: the client's next request may come at once
                rest = memoryview(message.get("body", b""))
                while len(rest) > PIECE_BYTES:  # uvicorn would hold all of it until the client has read it
                    await send({"type": "http.response.body", "body": rest[:PIECE_BYTES], "more_body": True})
                    rest = rest[PIECE_BYTES:]
                message = {**message, "body": rest}
            await send(message)

        try:
            self._check_host(headers)
            self._check_origin(scope, headers)
            self._check_key(scope["path"], headers)
        except HttpError as error:
            if scope["type"] == "websocket":
                await WebSocket(scope, receive, send).send_denial_response(error.response())
            else:
                await error.response()(scope, receive, send)
            return
        try:
            await self._app(scope, receive, answer)
        finally:
            reservation.release()

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_host(self, headers: Headers) -> None:
        """Refuse a foreign page whose name resolves to this machine: its requests have its own name as Host."""
        if len(headers.getlist("host")) > 1:
            raise HttpError(400, "The request has more than one Host header.", code="invalid_http")
        if not self._settings.check_host:
            return
        host = headers.get("host", "")
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if not is_loopback(name):
            message = (
                "This server has no API key, so it answers only to loopback names such as 127.0.0.1 and localhost."
            )
            raise HttpError(403, message, code="host_not_allowed")

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Refuse what the page of another site sends to a server without a key.

        Browsers ask in advance before they send JSON to another site, but not before forms and files.
        """
        if self._settings.api_key is not None:
            return
        origin = headers.get("origin")
        allowed = self._settings.cors_origins
        if origin is not None and (origin in allowed or "*" in allowed):
            return
        own = origin is None or urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
        # A link on another site may lead to the page.
        linked = scope.get("method") in ("GET", "HEAD") and scope["path"] in OPEN_PATHS
        if not own or (headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not linked):
            message = "This server has no API key, so it answers no web page of another site; the section http of the "
            message += "configuration can name the site in cors_origins."
            raise HttpError(403, message, code="origin_not_allowed")

    def _check_key(self, path: str, headers: Headers) -> None:
        key = self._settings.api_key
        if key is None or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if not given:
            scheme, given = "bearer", _key_of_subprotocols(headers)
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
            message = "The API key is missing or wrong: send Authorization: Bearer KEY."
            raise HttpError(401, message, code="invalid_api_key")


def _key_of_subprotocols(headers: Headers) -> str:
    """The key that a browser sends for a WebSocket, to which its pages can add no header. Empty if there is none."""
    for name in headers.get("sec-websocket-protocol", "").split(","):
        if name.strip().startswith(KEY_SUBPROTOCOL):
            return name.strip().removeprefix(KEY_SUBPROTOCOL)
    return ""


def _printable(path: str) -> str:
    """The path as it may stand in a log: %0A in a URL must not begin a line."""
    return path if path.isprintable() else ascii(path)
