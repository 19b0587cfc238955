"""What every request passes before the application sees it: host, key, size and form of the body, one log line.

Bodies are read here as a whole, so that a limit is a plain 413 or 408 and the routes get bodies that are bounded.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_actors.addresses import is_loopback
from omni_actors.http_server.failures import HttpError
from omni_actors.http_server.settings import ServerSettings
from omni_actors.logs import get_logger
from omni_actors.protocol.fields import TRACEPARENT

logger = get_logger(__name__)

OPEN_PATHS = frozenset({"/", "/app.js", "/style.css", "/health"})  # no secrets and no work
VALID_TRACEPARENT = re.compile(TRACEPARENT)
BODY_TYPES = {"/v1/files": "multipart/form-data"}
DEFAULT_BODY_TYPE = "application/json"
QUIET_PATHS = frozenset({"/v1/status", "/health", "/metrics"})  # polled: logged at debug only


class Gate:
    """ASGI middleware around the whole application.

    Leaves `request_id` (ours, for logs and the response's `x-request-id`) and `traceparent` (a valid W3C one, or
    `None`) in the scope's state.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
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
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._pass(scope, headers, receive, answer)
        finally:
            quiet = scope["path"] in QUIET_PATHS and status < 500
            logger.log(
                10 if quiet else 20,
                "%s %s %d in %.3f s",
                scope["method"],
                scope["path"][:200],
                status,
                time.monotonic() - began,
                extra={"request_id": request_id},
            )

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        size = 0
        try:
            try:
                self._check_host(headers)
                self._check_key(scope["path"], headers)
                body = b""
                if scope["method"] in ("POST", "PUT", "PATCH"):
                    self._check_form(scope["path"], headers)
                    body = await self._read(headers, receive)
                    size = len(body)
                    self._hold(size)
            except HttpError as error:
                await error.response()(scope, receive, send)
                return
            await self._app(scope, _Replay(body, receive), send)
        finally:
            self._held_bytes -= size

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_host(self, headers: Headers) -> None:
        """A foreign page whose name resolves to this machine sends its own name as Host."""
        if not self._settings.check_host:
            return
        host = headers.get("host", "")
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if not is_loopback(name):
            raise HttpError(
                403,
                "This server has no API key and answers only to loopback names such as 127.0.0.1 and localhost.",
                code="host_not_allowed",
            )

    def _check_key(self, path: str, headers: Headers) -> None:
        key = self._settings.api_key
        if key is None or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
            raise HttpError(
                401, "The API key is missing or wrong: send Authorization: Bearer KEY.", code="invalid_api_key"
            )

    def _check_form(self, path: str, headers: Headers) -> None:
        """The declared type must be right: types that browsers send to foreign sites unasked are refused."""
        wanted = BODY_TYPES.get(path, DEFAULT_BODY_TYPE)
        given = headers.get("content-type", "").partition(";")[0].strip().lower()
        if given != wanted:
            raise HttpError(
                415, f"The Content-Type is {given or 'missing'!r}; it must be {wanted}.", code="unsupported_media_type"
            )

    # -- body ---------------------------------------------------------------------------------------------------------

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._settings.body_bytes
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.read_timeout):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise HttpError(400, "The connection ended before the body did.", code="incomplete_body")
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > limit:
                        raise _too_large(limit)
                    more = message.get("more_body", False)
        except TimeoutError:
            seconds = self._settings.read_timeout
            raise HttpError(408, f"The body did not arrive within {seconds:g} s.", code="body_timeout") from None
        return b"".join(pieces)

    def _hold(self, size: int) -> None:
        if self._held_bytes + size > self._settings.bodies_bytes:
            self._held_bytes += size  # taken back by the caller, as for every body
            raise HttpError(
                503,
                "The server holds as many bytes of requests as it may.",
                code="overloaded",
                kind="service_unavailable_error",
                retry_after=1.0,
            )
        self._held_bytes += size


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"The body exceeds the limit of {limit} bytes.", code="body_too_large")


class _Replay:
    """`receive` for the application: the body that was read, then what the connection says (a disconnect)."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()
