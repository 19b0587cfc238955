"""The ASGI application: its routes, what they answer to errors, and their OpenAPI document."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from omni_actors import __version__
from omni_actors.errors import OmniError
from omni_actors.http_server import chat, completions, files, images, responses, speech, status, transcriptions, voices
from omni_actors.http_server.bodies import REFERENCE, FormBody, JsonBody
from omni_actors.http_server.decoding import decode
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.fetch import Fetcher
from omni_actors.http_server.middleware import RequestMiddleware
from omni_actors.http_server.realtime import route as realtime
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.shares import BodyBytes
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.logs import get_logger, trace_of
from omni_actors.protocol.payloads import StageParams

logger = get_logger(__name__)

PREFIX = "/v1"
REALTIME = "/v1/realtime"
PARAMETER = re.compile(r"{(\w+)(:path)?}")  # of a path


class Endpoint(NamedTuple):
    """A method of a path.

    Args:
        handler: called with the request, the server's state, and the decoded body or query if there is one.
        body: how the body is decoded.
        query: struct of the parameters in the query.
    """

    method: str
    path: str
    handler: Callable[..., Awaitable[Response]]
    body: JsonBody[Any] | FormBody[Any] | None = None
    query: type[msgspec.Struct] | None = None

    async def __call__(self, request: Request) -> Response:
        """Check the query, read the body and answer. Raises `HttpError`."""
        known = self.query.__struct_fields__ if self.query is not None else ()
        for name in request.query_params if self.path.startswith(f"{PREFIX}/") else ():  # probes add some to others
            if name not in known:
                what = f"it has {', '.join(known)}" if known else "it has none"
                message = f"{name[:100]}: {self.path} has no such parameter of the query; {what}."
                raise bad_field(name[:100], message, "unknown_parameter")
        given: list[Any] = []
        if self.body is not None:
            given.append(await self.body.read(request, request.app.state.settings))
        if self.query is not None:
            given.append(decode(msgspec.json.encode(dict(request.query_params)), self.query))
        return await self.handler(request, request.app.state.server, *given)

    def described(self) -> dict[str, Any]:
        """The operation in an OpenAPI document."""
        named = self.handler.__name__.strip("_")
        path = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name, _ in PARAMETER.findall(self.path)
        ]
        fields = (
            msgspec.json.schema_components([self.query])[1][self.query.__name__]["properties"] if self.query else {}
        )
        query = [{"name": name, "in": "query", "required": False, "schema": field} for name, field in fields.items()]
        return {
            "summary": named.replace("_", " ").title(),
            "description": inspect.cleandoc(self.handler.__doc__ or ""),
            "operationId": f"{self.handler.__module__.rpartition('.')[2]}_{named}",
            "parameters": path + query,
            **({"requestBody": self.body.described()} if self.body is not None else {}),
            "responses": {"200": {"description": "Success"}, **dict.fromkeys(ERROR_STATUSES, ERROR)},
        }


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", chat.chat_completions, chat.BODY),
    Endpoint("POST", "/v1/responses", responses.create, responses.BODY),
    Endpoint("GET", "/v1/responses/{response_id}", responses.retrieve),
    Endpoint("DELETE", "/v1/responses/{response_id}", responses.delete),
    Endpoint("POST", "/v1/completions", completions.completions, completions.BODY),
    Endpoint("POST", "/v1/audio/speech", speech.speech, speech.BODY),
    Endpoint("GET", "/v1/audio/voices", voices.voices),
    Endpoint("POST", "/v1/audio/voices", voices.create, voices.BODY),
    Endpoint("GET", "/v1/audio/voices/{name}", voices.voice),
    Endpoint("DELETE", "/v1/audio/voices/{name}", voices.delete),
    Endpoint("POST", "/v1/audio/transcriptions", transcriptions.transcriptions, transcriptions.TRANSCRIPTION),
    Endpoint("POST", "/v1/audio/translations", transcriptions.translations, transcriptions.TRANSLATION),
    Endpoint("POST", "/v1/images/generations", images.generations, images.GENERATION),
    Endpoint("POST", "/v1/images/edits", images.edits, images.EDIT),
    Endpoint("POST", "/v1/files", files.upload, files.BODY),
    Endpoint("GET", "/v1/files", files.files),
    Endpoint("GET", "/v1/files/{file_id}", files.file),
    Endpoint("DELETE", "/v1/files/{file_id}", files.delete),
    Endpoint("GET", "/health", status.health),
    Endpoint("GET", "/metrics", status.metrics),
    Endpoint("GET", "/v1/models", status.models),
    Endpoint("GET", "/v1/models/{name:path}", status.model),
    Endpoint("GET", "/v1/status", status.status),
    Endpoint("GET", "/v1/requests", status.recent_timelines, query=status.RecentQuery),
    Endpoint("GET", "/v1/requests/{request_id}/timeline", status.timeline),
)


def create_app(settings: ServerSettings, *, fetcher: Fetcher | None = None, bodies: BodyBytes | None = None) -> ASGIApp:
    """Make the whole server as an ASGI application.

    Args:
        fetcher: fetches media by URL; made from `settings` if `None`.
        bodies: accounts for the bytes of all requests, also those that have not reached the application.
    """
    bodies = bodies or BodyBytes(settings.bodies_bytes)
    app: ASGIApp = RequestMiddleware(create_routes(settings, fetcher=fetcher, bodies=bodies), settings, bodies)
    if settings.cors_origins:
        # Outermost, because a browser asks in advance without the key, and must be able to read refusals.
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "traceparent"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def create_routes(
    settings: ServerSettings, *, fetcher: Fetcher | None = None, bodies: BodyBytes | None = None
) -> Starlette:
    """Make the application without its middleware, so without key and request ids."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        state = ServerState(settings, bodies or BodyBytes(settings.bodies_bytes), fetcher)
        async with state.client:
            app.state.server = state
            yield
            await state.close()

    by_path: defaultdict[str, dict[str, Endpoint]] = defaultdict(dict)
    for operation in ENDPOINTS:
        by_path[operation.path][operation.method] = operation
    routes = [_route(path, operations) for path, operations in by_path.items()]
    routes += [Route(path, status.page) for path in status.PAGE_FILES]
    routes += [Route("/openapi.json", _openapi), Route(REALTIME, _no_websocket)]
    answer: Any = _answer  # which takes requests and WebSockets
    app = Starlette(
        routes=[*routes, WebSocketRoute(REALTIME, realtime.realtime)],
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((HttpError, OmniError, HTTPException, Exception), answer),
    )
    app.router.default = _no_route
    app.state.settings = settings
    return app


def _route(path: str, operations: dict[str, Endpoint]) -> Route:
    async def endpoint(request: Request) -> Response:
        return await operations["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, endpoint, methods=list(operations))


async def _no_websocket(request: Request) -> Response:
    message = (
        f"{REALTIME} is a WebSocket: connect to it with ws:// or wss://, and let proxies on the way pass upgrades on."
    )
    error = HttpError(426, message, code="upgrade_required")
    error.headers.update({"upgrade": "websocket", "connection": "upgrade"})
    raise error


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    """Raise the error for a path that no route has, with the nearest one and the others."""
    path: str = scope["path"]
    if scope["type"] == "websocket":
        raise HttpError(404, f"There is no WebSocket at {path[:200]!r}.", code="not_found")
    listed = sorted({operation.path for operation in ENDPOINTS} - {"/metrics"})
    wanted = f"{PREFIX}{path}" if not path.startswith(PREFIX) else path
    nearest = difflib.get_close_matches(wanted[:200], listed, n=1, cutoff=0.7)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    message = f"There is nothing at {path[:200]!r}.{hint} The routes are {', '.join(listed)}."
    raise HttpError(404, message, code="not_found")


async def _answer(connection: HTTPConnection, error: Exception) -> Response | None:
    """Answer what a route has raised, and refuse a WebSocket that was not accepted yet with the same answer."""
    match error:
        case HttpError():
            found = error
        case OmniError():
            found = HttpError.of(error)
        case HTTPException(status_code=405, headers=dict(headers)):
            allowed = ", ".join(sorted(set(headers["Allow"].split(", ")) - {"HEAD"}))
            method = connection.scope["method"][:20]
            found = HttpError(405, f"{connection.url.path[:200]} takes {allowed}, not {method}.", code="http_405")
            found.headers["allow"] = allowed
        case _:
            about = {"request_id": getattr(connection.state, "request_id", "")}
            logger.error("a request failed: %s", trace_of(error), extra=about)
            found = HttpError(500, "Internal error: see the server's log.", code="internal_error")
    if isinstance(connection, WebSocket):
        await connection.send_denial_response(found.response())
        return None
    return found.response()


# ---------------------------------------------------------------------------------------------------------------------
# OpenAPI

ERROR_STATUSES = ("400", "401", "403", "404", "408", "413", "415", "429", "500", "503", "504")
ERROR = {"description": "Error", "content": {"application/json": {"schema": {"$ref": REFERENCE.format(name="Error")}}}}
TEXT, NULLABLE_TEXT = {"type": "string"}, {"type": ["string", "null"]}
ERROR_FIELDS: dict[str, Any] = {"message": TEXT, "type": TEXT, "param": NULLABLE_TEXT, "code": NULLABLE_TEXT}
ERROR_BODY = {"type": "object", "required": list(ERROR_FIELDS), "properties": ERROR_FIELDS}
ERROR_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": ERROR_BODY}}


@functools.cache
def openapi_document() -> dict[str, Any]:
    """The OpenAPI document of all operations, made when it is first asked for."""
    paths: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for operation in ENDPOINTS:
        paths[operation.path.replace(":path}", "}")][operation.method.lower()] = operation.described()
    kinds = [operation.body.kind for operation in ENDPOINTS if isinstance(operation.body, JsonBody)]
    components = msgspec.json.schema_components([*kinds, StageParams], ref_template=REFERENCE)[1]
    return {
        "openapi": "3.1.0",
        "info": {"title": "omni_actors", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": ERROR_SCHEMA}},
    }


async def _openapi(request: Request) -> Response:
    return json_response(openapi_document())
