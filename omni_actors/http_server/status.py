"""Routes about the server and its pipeline: health, models, status, metrics, timelines, and the web page of them."""

from __future__ import annotations

import asyncio
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.errors import InvalidRequest
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.state import ServerState, json_response, readiness
from omni_actors.telemetry.metric_table import HTTP_TABLE
from omni_actors.telemetry.prometheus import render
from omni_actors.telemetry.timeline import as_json

PIPELINE_FIELDS = ("pipeline", "modalities", "parameters", "speech", "outputs", "sample_rate", "healthy", "in_flight")
STAGE_FIELDS = ("stage", "replica", "state", "spare", "joining", "leaving", "in_flight", "counts")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def health(request: Request, state: ServerState) -> Response:
    """200 if every replica is ready, else 503 with the names of those that are not."""
    description, missing = await readiness(state)
    if description is not None and not missing:
        return json_response({"status": "ok"})
    return json_response(
        {"status": "unavailable" if description is None else "degraded", "missing": missing}, 503, {"retry-after": "1"}
    )


async def models(request: Request, state: ServerState) -> Response:
    """The names under which the pipeline's model is served, and its LoRA adapters, whose parent it is."""
    description = await state.describe()
    names = state.model_names(description)
    adapters = [_model(name, state, names[0]) for name in description.adapters]
    return json_response({"object": "list", "data": [*(_model(name, state) for name in names), *adapters]})


async def model(request: Request, state: ServerState) -> Response:
    """One of these models."""
    name = request.path_params["name"]
    description = await state.describe()
    parent = state.model_names(description)[0] if name in description.adapters else None
    return json_response(_model(state.model_name(name, description), state, parent))


def _model(name: str, state: ServerState, parent: str | None = None) -> dict[str, Any]:
    """OpenAI's fields, then those of vLLM's that its tools need (`vllm bench serve` reads `root`)."""
    of_openai = {"id": name, "object": "model", "created": state.started, "owned_by": "omni_actors"}
    return {**of_openai, "root": name, "parent": parent}


async def status(request: Request, state: ServerState) -> Response:
    """The state of the pipeline and its replicas, as the web page shows it."""
    description = await state.describe()
    voices = [*description.voices, *(voice.name for voice in await asyncio.to_thread(state.voices.all))]
    stages = [{name: getattr(stage, name) for name in STAGE_FIELDS} for stage in description.stages]
    pipeline = {name: getattr(description, name) for name in PIPELINE_FIELDS}
    return json_response({**pipeline, "models": state.model_names(description), "voices": voices, "stages": stages})


async def metrics(request: Request, state: ServerState) -> Response:
    """Prometheus text of the whole pipeline, and of this server."""
    own = render(state.realtime.meters, HTTP_TABLE)
    return Response(await state.client.metrics() + own, media_type=METRICS_TYPE)


class RecentQuery(msgspec.Struct):
    """The query of GET /v1/requests."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 20


async def recent_timelines(request: Request, state: ServerState, query: RecentQuery) -> Response:
    """Timelines of the requests that ended last, the newest first."""
    return json_response(
        {"object": "list", "data": [as_json(timeline) for timeline in await state.client.recent(query.limit)]}
    )


async def timeline(request: Request, state: ServerState) -> Response:
    """The timeline of a running request or of one of the last 200 that ended."""
    try:
        return json_response(as_json(await state.client.timeline(request.path_params["request_id"])))
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
