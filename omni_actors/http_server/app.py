"""The ASGI application: routes, errors, OpenAPI schema."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from omni_actors import __version__
from omni_actors.errors import OmniError
from omni_actors.http_server import (
    chat,
    completions,
    files,
    images,
    responses,
    speech,
    status,
    transcriptions,
    voices,
    web_page,
)
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.fetch import Fetcher
from omni_actors.http_server.image_schemas import ImageRequest
from omni_actors.http_server.json_body import schemas
from omni_actors.http_server.middleware import RequestMiddleware
from omni_actors.http_server.realtime import route as realtime
from omni_actors.http_server.reservations import BodyBytes
from omni_actors.http_server.response_schemas import ResponsesRequest
from omni_actors.http_server.routing import no_route
from omni_actors.http_server.schemas import ChatRequest, CompletionRequest, SpeechRequest
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.state import ServerState
from omni_actors.logs import get_logger, trace_of
from omni_actors.protocol.payloads import StageParams

logger = get_logger(__name__)

BODIES = (
    ChatRequest,
    ResponsesRequest,
    CompletionRequest,
    SpeechRequest,
    ImageRequest,
    StageParams,
)  # documented besides what FastAPI documents
ERROR_STATUSES = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
WANTED = {  # pydantic's types of errors, as far as the routes' parameters can have them
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_too_long": "a text of at most {max_length} characters",
    "string_type": "a text",
}
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def create_app(settings: ServerSettings, *, fetcher: Fetcher | None = None, bodies: BodyBytes | None = None) -> ASGIApp:
    """Make the whole server as an ASGI application.

    Args:
        fetcher: fetches media by URL; made from `settings` if `None`.
        bodies: accounts for the bytes of all requests, also those that have not reached the application.
    """
    bodies = bodies or BodyBytes(settings.bodies_bytes)
    routes = create_routes(settings, fetcher=fetcher, bodies=bodies)
    app: ASGIApp = RequestMiddleware(routes, settings, routes.routes, bodies)
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
) -> FastAPI:
    """Make the application without its middleware, so without key, limits on bodies and request ids."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state = ServerState(settings, bodies or BodyBytes(settings.bodies_bytes), fetcher)
        async with state.client:
            app.state.server = state
            yield
            await state.close()

    # Uploads are kept in memory, so they do not lie in files on the way there, where a full disk would fail them.
    MultiPartParser.spool_max_size = settings.body_bytes
    app = FastAPI(title="omni_actors", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_exception_handler(HttpError, _on_http_error)
    app.add_exception_handler(OmniError, _on_omni_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_routing)
    app.add_exception_handler(Exception, _on_bug)
    audio = (speech, voices, transcriptions)
    for module in (chat, responses, completions, *audio, images, files, realtime, status, web_page):
        app.include_router(module.router)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    return app


# ---------------------------------------------------------------------------------------------------------------------
# Errors


async def _on_http_error(request: Request, error: Exception) -> Response:
    return error.response() if isinstance(error, HttpError) else await _on_bug(request, error)


async def _on_omni_error(request: Request, error: Exception) -> Response:
    return HttpError.of(error).response() if isinstance(error, OmniError) else await _on_bug(request, error)


async def _on_invalid(request: Request, error: Exception) -> Response:
    """Report the first parameter of the path or query, or field of the form, that is wrong; bodies report their own."""
    if not isinstance(error, RequestValidationError):
        return await _on_bug(request, error)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    if first["type"] == "missing":
        return bad_field(param, f"{param}: the field is missing.", "missing_required_parameter").response()
    return bad_field(param, f"{param}: must be {_wanted(first['type'], first.get('ctx', {}))}.").response()


def _wanted(kind: str, limits: Mapping[str, Any]) -> str:
    """What a parameter must be, from pydantic's name of what is wrong with it and the limits that it breaks."""
    if kind in WANTED:
        return WANTED[kind].format(**limits)
    return f"another value ({kind.replace('_', ' ')})"


async def _on_routing(request: Request, error: Exception) -> Response:
    """Report 404 and 405 of the router, and 400 of the body parser."""
    if not isinstance(error, HTTPException):
        return await _on_bug(request, error)
    if error.status_code == 404:
        return no_route(request.app.routes, request.url.path).response()
    response = HttpError(error.status_code, f"{error.detail.rstrip('.')}.", code=f"http_{error.status_code}").response()
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, error: Exception) -> Response:
    about = {"request_id": getattr(request.state, "request_id", "")}
    logger.error("a request failed: %s", trace_of(error), extra=about)
    failure = HttpError(500, "Internal error: see the server's log.", code="internal_error")
    return failure.response()


# ---------------------------------------------------------------------------------------------------------------------
# OpenAPI


def _schema(app: FastAPI) -> dict[str, Any]:
    """FastAPI's schema with this server's errors instead of FastAPI's."""
    if app.openapi_schema is None:
        schema = FastAPI.openapi(app)
        errors = {
            str(status): {
                "description": "Error",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            }
            for status in ERROR_STATUSES
        }
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                operation["responses"].update(errors)
        schema["components"]["schemas"].update(schemas(BODIES), Error=ERROR_SCHEMA)
        app.openapi_schema = schema
    return app.openapi_schema
