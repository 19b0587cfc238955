"""The HTTP application: its routes, the checks of every request, and what it says about itself."""

from __future__ import annotations

import asyncio
import difflib
import functools
import hmac
import inspect
import logging
import re
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from omni_actors import __version__
from omni_actors.config.checkpoint import read_json_object
from omni_actors.errors import ConfigError, ErrorCode, InvalidRequest, OmniError
from omni_actors.http_server import chat, images, responses, state, transcriptions, videos
from omni_actors.http_server.bodies import BODIES, REFERENCE, FormBody, JsonBody, decode
from omni_actors.http_server.errors import STOPPING, HttpError, bad_field, internal_error
from omni_actors.http_server.media import Fetcher
from omni_actors.http_server.realtime import calls, client_secrets, live_sessions
from omni_actors.http_server.realtime import connection as realtime
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.speech import elevenlabs, stream, texts, voices
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.logs import get_logger, trace_of
from omni_actors.protocol.fields import TRACEPARENT
from omni_actors.protocol.messages import Description
from omni_actors.protocol.payloads import StageParams
from omni_actors.sharing import Budget
from omni_actors.telemetry.endpoint import METRICS_TYPE, is_name_of_loopback
from omni_actors.telemetry.timeline import as_json

logger = get_logger(__name__)

PIPELINE_FIELDS = (
    *("pipeline", "modalities", "max_media", "parameters", "speech", "hearing", "outputs", "sample_rate", "on_cpu"),
    *("aligning", "healthy", "in_flight"),
)
STAGE_FIELDS = ("stage", "replica", "state", "spare", "joining", "leaving", "in_flight", "counts")


async def health(request: Request, state: ServerState) -> Response:
    """200 if every replica is ready, else 503 with the names of those that are not."""
    status = "degraded"
    try:
        replicas = (await state.describe()).stages
    except OmniError as error:
        status, missing = "unavailable", [error.message]
    else:
        away = (one for one in replicas if one.state != "ready" and not one.leaving)
        missing = [f"{one.stage}/{one.replica} ({one.state})" for one in away if one.state == "dead" or not one.joining]
    if not missing:
        return json_response({"status": "ok"})
    return json_response({"status": status, "missing": missing}, 503, {"retry-after": "1"})


async def models(request: Request, state: ServerState) -> Response:
    """The names under which the pipeline's model is served, and its LoRA adapters, whose parent it is."""
    description = await state.describe()
    names = (*state.model_names(description), *description.adapters)
    return json_response({"object": "list", "data": [_model(name, state, description) for name in names]})


async def model(request: Request, state: ServerState, name: str) -> Response:
    """One of these models."""
    description = await state.describe()
    return json_response(_model(state.model_name(name, description), state, description))


def _model(name: str, state: ServerState, description: Description) -> dict[str, Any]:
    """OpenAI's fields, then those of vLLM's that its tools need (`vllm bench serve` reads `root`)."""
    parent = state.model_names(description)[0] if name in description.adapters else None
    of_openai = {"id": name, "object": "model", "created": state.started, "owned_by": "omni_actors"}
    return {**of_openai, "root": name, "parent": parent}


@functools.cache
def introduction(model: str) -> dict[str, Any]:
    """What a checkpoint says to visitors of the web page, in `page.json` of its folder: `about` and `examples`."""
    path = Path(model) / "page.json"
    try:
        return read_json_object(path) if path.exists() else {}
    except ConfigError as error:
        logger.warning("The web page shows examples of its own: %s", error)
        return {}


async def status(request: Request, state: ServerState) -> Response:
    """The state of the pipeline and its replicas, as the web page shows it."""
    description = await state.describe()
    voices = [*description.voices, *(voice.name for voice in await asyncio.to_thread(state.voices.all))]
    stages = [{name: getattr(stage, name) for name in STAGE_FIELDS} for stage in description.stages]
    pipeline = {name: getattr(description, name) for name in PIPELINE_FIELDS}
    own = {"models": state.model_names(description), "voices": voices, "webrtc": calls.available()}
    own["page"] = await asyncio.to_thread(introduction, description.model)
    return json_response({**pipeline, **own, "stages": stages})


async def metrics(request: Request, state: ServerState) -> Response:
    """Prometheus text of the whole pipeline and of this server, all its processes together."""
    state.client.report(state.realtime.meters.snapshot())
    return Response(await state.client.metrics(), media_type=METRICS_TYPE)


class RecentQuery(msgspec.Struct):
    """The query of GET /v1/requests."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 20


async def recent_timelines(request: Request, state: ServerState, query: RecentQuery) -> Response:
    """Timelines of the requests that ended last, the newest first."""
    data = [as_json(timeline) for timeline in await state.client.recent(query.limit)]
    return json_response({"object": "list", "data": data})


async def timeline(request: Request, state: ServerState, request_id: str) -> Response:
    """The timeline of a running request or of one of the last 200 that ended."""
    try:
        return json_response(as_json(await state.client.timeline(request_id)))
    except InvalidRequest as error:
        raise HttpError(404, error.message, param="request_id", code="not_found") from None


# ---------------------------------------------------------------------------------------------------------------------
# The web page

MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}  # other files are not served
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
        "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def _files(folder: Traversable, path: str) -> dict[str, Traversable]:
    """The files of a folder and of those in it, by the path of their URL."""
    found: dict[str, Traversable] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= _files(entry, f"{path}{entry.name}/")
        elif entry.name.rpartition(".")[2] in MEDIA_TYPES:
            found[f"{path}{entry.name.removesuffix('index.html')}"] = entry
    return found


PAGE_FILES = _files(resources.files("omni_actors.http_server") / "page", "/")


async def page(request: Request) -> Response:
    """One of the page's files."""
    file = PAGE_FILES[request.url.path]
    media_type = MEDIA_TYPES[file.name.rpartition(".")[2]]
    return Response(file.read_bytes(), media_type=media_type, headers=PAGE_HEADERS)


OPEN_PATHS = frozenset({*PAGE_FILES, "/health"})  # no key needed: they hold no secrets and cause no work
VALID_TRACEPARENT = re.compile(TRACEPARENT)
SWITCHING_PROTOCOLS = 101
BEGINNINGS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
PIECE_BYTES = 65_536  # of an answer that are written at once
POLLED_PATHS = frozenset({"/v1/status", "/health", "/metrics"})  # logged at debug only


class RequestMiddleware:
    """ASGI middleware around the whole application.

    Puts `request_id` (for logs and the response's `x-request-id`) and `traceparent` (the caller's W3C trace context if
    it is valid, else `None`) into the scope's state.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, bodies: Budget) -> None:
        self._app = app
        self._settings = settings
        self._bodies = bodies

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
        holder = object()
        BODIES.set((self._bodies, holder))

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] in BEGINNINGS:
                status = message.get("status", SWITCHING_PROTOCOLS)
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                self._bodies.release(holder)  # first: the client's next request may come at once
                rest = memoryview(message.get("body", b""))
                while len(rest) > PIECE_BYTES:  # uvicorn would hold all of it until the client has read it
                    await send({"type": "http.response.body", "body": rest[:PIECE_BYTES], "more_body": True})
                    rest = rest[PIECE_BYTES:]
                message = {**message, "body": rest}
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, receive, answer)
        except HttpError as error:
            await error.response()(scope, receive, answer)
        except asyncio.CancelledError:  # by uvicorn, at the end of the time that a stop gives to requests
            if status or scope["type"] == "websocket":
                raise
            await HttpError(503, STOPPING, code=ErrorCode.STAGE_UNAVAILABLE).response()(scope, receive, answer)
        finally:
            self._bodies.release(holder)
            quiet = scope["path"] in POLLED_PATHS and status < 500
            level, method = logging.DEBUG if quiet else logging.INFO, scope.get("method", "WEBSOCKET")
            what = (method, _printable(scope["path"][:200]), status, time.monotonic() - began)
            logger.log(level, "%s %s %d in %.3f s", *what, extra={"request_id": request_id})

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise `HttpError` for a request that this server does not take from where it comes."""
        self._check_host(headers)
        self._check_origin(scope, headers)
        self._check_key(scope["path"], headers)

    def _check_host(self, headers: Headers) -> None:
        """Refuse a foreign page whose name resolves to this machine: its requests have its own name as Host."""
        if len(headers.getlist("host")) > 1:
            raise HttpError(400, "The request has more than one Host header.", code="invalid_http")
        if not self._settings.check_host:
            return
        if not is_name_of_loopback(headers.get("host", "")):
            message = "Without an API key this server answers only to loopback names such as 127.0.0.1 and localhost."
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
            message = "Without an API key this server answers pages of other sites only if http.cors_origins has them."
            raise HttpError(403, message, code="origin_not_allowed")

    def _check_key(self, path: str, headers: Headers) -> None:
        key = self._settings.api_key
        if key is None or path in OPEN_PATHS or state.PICTURE_PATH.fullmatch(path):
            return
        given = client_secrets.key_of(headers)
        if path in (REALTIME, calls.PATH) and client_secrets.opened(given, key) is not None:
            return
        if not hmac.compare_digest(given.encode(), key.encode()):
            message = "The API key is missing or wrong: send Authorization: Bearer KEY."
            raise HttpError(401, message, code="invalid_api_key")


def _printable(path: str) -> str:
    """The path as it may stand in a log: %0A in a URL must not begin a line."""
    return path if path.isprintable() else ascii(path)


PREFIX = "/v1"
REALTIME = "/v1/realtime"
PARAMETER = re.compile(r"{(\w+)(:path)?}")  # of a path


class Endpoint(NamedTuple):
    """A method of a path.

    Args:
        handler: called with the request, the server's state, the decoded body or query if there is one, and what the
            path names.
        body: how the body is decoded.
        query: struct of the parameters in the query.
    """

    method: str
    path: str
    handler: Callable[..., Awaitable[Response]]
    body: JsonBody[Any] | FormBody[Any] | calls.OfferBody | None = None
    query: type[msgspec.Struct] | None = None

    async def __call__(self, request: Request) -> Response:
        """Check the query, read the body and answer. Raises `HttpError`."""
        is_probe = not self.path.startswith(f"{PREFIX}/")  # which may come with any query
        query = [] if is_probe else _query(request, self.path, self.query)
        body = [] if self.body is None else [await self.body.read(request, request.app.state.settings)]
        return await self.handler(request, request.app.state.server, *body, *query, **request.path_params)

    def described(self) -> dict[str, Any]:
        """The operation in an OpenAPI document."""
        named = self.handler.__name__.strip("_")
        path = [(name, "path", {"type": "string"}) for name, _ in PARAMETER.findall(self.path)]
        query = msgspec.json.schema(self.query)["$defs"][self.query.__name__]["properties"] if self.query else {}
        parameters = [*path, *((name, "query", field) for name, field in query.items())]
        return {
            "summary": named.replace("_", " ").title(),
            "description": inspect.cleandoc(self.handler.__doc__ or ""),
            "operationId": f"{self.handler.__module__.rpartition('.')[2]}_{named}",
            "parameters": [
                {"name": name, "in": place, "required": place == "path", "schema": schema}
                for name, place, schema in parameters
            ],
            **({"requestBody": self.body.described()} if self.body is not None else {}),
            "responses": {"200": {"description": "Success"}, **dict.fromkeys(ERROR_STATUSES, ERROR)},
        }


def _query(connection: HTTPConnection, path: str, kind: type[msgspec.Struct] | None) -> list[Any]:
    """The query as a struct, if the path has one. Raises `HttpError` 400 for parameters that it does not take."""
    known = kind.__struct_fields__ if kind is not None else ()
    for name in connection.query_params:
        if name not in known:
            what = f"it has {', '.join(known)}" if known else "it has none"
            message = f"{name[:100]}: {path} has no such parameter of the query; {what}."
            raise bad_field(name[:100], message, "unknown_parameter")
    return [] if kind is None else [decode(msgspec.json.encode(dict(connection.query_params)), kind)]


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", chat.chat_completions, chat.BODY),
    Endpoint("POST", "/v1/responses", responses.create, responses.BODY),
    Endpoint("GET", "/v1/responses/{response_id}", responses.retrieve, query=responses.RetrieveQuery),
    Endpoint("DELETE", "/v1/responses/{response_id}", responses.delete),
    Endpoint("POST", "/v1/completions", chat.completions, chat.COMPLETION_BODY),
    Endpoint("POST", "/v1/audio/speech", texts.speech, texts.BODY),
    Endpoint("GET", "/v1/audio/voices", voices.voices),
    Endpoint("POST", "/v1/audio/voices", voices.create, voices.VOICE_BODY),
    Endpoint("GET", "/v1/audio/voices/{name}", voices.voice),
    Endpoint("DELETE", "/v1/audio/voices/{name}", voices.delete),
    Endpoint("POST", "/v1/audio/transcriptions", transcriptions.transcriptions, transcriptions.TRANSCRIPTION),
    Endpoint("POST", "/v1/audio/translations", transcriptions.translations, transcriptions.TRANSLATION),
    Endpoint("POST", "/v1/images/generations", images.generations, images.GENERATION),
    Endpoint("POST", "/v1/images/edits", images.edits, images.EDIT),
    Endpoint("POST", "/v1/videos", videos.create, videos.BODY),
    Endpoint("GET", "/v1/videos", videos.listed, query=videos.ListQuery),
    Endpoint("GET", "/v1/videos/{video_id}", videos.retrieve),
    Endpoint("DELETE", "/v1/videos/{video_id}", videos.delete),
    Endpoint("GET", "/v1/videos/{video_id}/content", videos.content, query=videos.ContentQuery),
    Endpoint("POST", "/v1/realtime/client_secrets", realtime.create_secret, client_secrets.BODY),
    Endpoint("POST", "/v1/files", state.upload, state.BODY),
    Endpoint("GET", "/v1/files", state.files),
    Endpoint("GET", "/v1/files/{file_id}", state.file),
    Endpoint("GET", "/v1/files/{file_id}/content", state.content),
    Endpoint("DELETE", "/v1/files/{file_id}", state.delete),
    Endpoint("POST", calls.PATH, calls.create, calls.BODY, realtime.CallQuery),
    Endpoint("POST", f"{calls.PATH}/{{call_id}}/hangup", calls.hang_up),
    Endpoint("POST", live_sessions.PATH, live_sessions.create, live_sessions.BODY),
    Endpoint("POST", f"{live_sessions.SESSION}/fork", live_sessions.fork_call, live_sessions.FORK_BODY),
    Endpoint("POST", f"{live_sessions.SESSION}/hangup", live_sessions.hang_up),
    Endpoint("GET", "/health", health),
    Endpoint("GET", "/metrics", metrics),
    Endpoint("GET", "/v1/models", models),
    Endpoint("GET", "/v1/models/{name:path}", model),
    Endpoint("GET", "/v1/status", status),
    Endpoint("GET", "/v1/requests", recent_timelines, query=RecentQuery),
    Endpoint("GET", "/v1/requests/{request_id}/timeline", timeline),
)

SOCKETS: dict[str, tuple[Callable[..., Awaitable[None]], type[msgspec.Struct] | None]] = {  # handler and query
    REALTIME: (realtime.realtime, realtime.SessionQuery),
    live_sessions.PATH: (live_sessions.live, None),
    f"{live_sessions.SESSION}/attach": (live_sessions.attach, live_sessions.AttachQuery),
    f"{live_sessions.SESSION}/fork": (live_sessions.fork, None),
    stream.PATH: (stream.stream, None),
    elevenlabs.SINGLE: (elevenlabs.stream_input, elevenlabs.Query),
    elevenlabs.MULTI: (elevenlabs.stream_input, elevenlabs.Query),
}


def create_app(settings: ServerSettings, *, fetcher: Fetcher | None = None, bodies: Budget | None = None) -> ASGIApp:
    """Make the whole server as an ASGI application.

    Args:
        fetcher: fetches media by URL; made from `settings` if `None`.
        bodies: accounts for the bytes of all requests, also those that have not reached the application.
    """
    bodies = bodies or Budget(settings.bodies_bytes)
    app: ASGIApp = RequestMiddleware(create_routes(settings, bodies, fetcher), settings, bodies)
    if settings.cors_origins:
        # Outermost, because a browser asks in advance without the key, and must be able to read refusals.
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Last-Event-ID", "traceparent"],
            expose_headers=["x-request-id", "retry-after", "location"],
        )
    return app


def create_routes(settings: ServerSettings, bodies: Budget, fetcher: Fetcher | None = None) -> Starlette:
    """Make the application without its middleware, so without key and request ids."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with ServerState(settings, bodies, fetcher) as app.state.server:
            yield

    by_path: defaultdict[str, dict[str, Endpoint]] = defaultdict(dict)
    for operation in ENDPOINTS:
        by_path[operation.path][operation.method] = operation
    routes = [_route(path, operations) for path, operations in by_path.items()]
    routes += [Route(path, page) for path in PAGE_FILES]
    routes += [Route("/openapi.json", _openapi), *(Route(path, _no_websocket) for path in SOCKETS)]
    answer: Any = _answer  # which takes requests and WebSockets
    app = Starlette(
        routes=[*routes, *map(_socket, SOCKETS)],
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


def _socket(path: str) -> WebSocketRoute:
    handler, kind = SOCKETS[path]

    async def endpoint(websocket: WebSocket) -> None:
        query = _query(websocket, path, kind)
        await handler(websocket, websocket.app.state.server, *query, **websocket.path_params)

    return WebSocketRoute(path, endpoint)


async def _no_websocket(request: Request) -> Response:
    message = (
        f"{request.url.path[:200]} is a WebSocket: connect with ws:// or wss://, and let proxies pass upgrades on."
    )
    error = HttpError(426, message, code="upgrade_required")
    error.headers.update({"upgrade": "websocket", "connection": "upgrade"})
    raise error


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    """Raise the error for a path that no route has, with the nearest one and the others."""
    path: str = scope["path"]
    if scope["type"] == "websocket":
        raise HttpError(404, f"There is no WebSocket at {path[:200]!r}.", code="not_found")
    listed = sorted({*SOCKETS, *(operation.path.replace(":path}", "}") for operation in ENDPOINTS)})
    wanted = f"{PREFIX}{path}" if not path.startswith(PREFIX) else path
    nearest = difflib.get_close_matches(wanted[:200], listed, n=1, cutoff=0.8)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    message = f"There is nothing at {path[:200]!r}.{hint} The routes are {', '.join(listed)}."
    raise HttpError(404, message, code="not_found")


async def _answer(connection: HTTPConnection, error: Exception) -> Response:
    """Answer what a route has raised, or refuse a WebSocket that was not accepted yet."""
    match error:
        case HttpError() | OmniError():
            found = HttpError.of(error)
        case HTTPException(status_code=405, headers=dict(headers)):
            allowed = ", ".join(sorted(set(headers["Allow"].split(", ")) - {"HEAD"}))
            method = connection.scope["method"][:20]
            found = HttpError(405, f"{connection.url.path[:200]} takes {allowed}, not {method}.", code="http_405")
            found.headers["allow"] = allowed
        case _:
            about = {"request_id": getattr(connection.state, "request_id", "")}
            logger.error("a request failed: %s", trace_of(error), extra=about)
            found = internal_error()
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
