"""What the server says about itself: models, voices, health, status, metrics; and the uploaded files."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, File, Form, Path, Query, UploadFile
from starlette.responses import Response

from omni_actors.errors import InvalidRequest
from omni_actors.http_server.failures import HttpError
from omni_actors.http_server.media import Files, UploadedFile
from omni_actors.http_server.state import ServerState, readiness, server_state
from omni_actors.telemetry.timeline import as_json

router = APIRouter()
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
State = Annotated[ServerState, Depends(server_state)]


def json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


@router.get("/health", response_class=Response)
async def health(state: State) -> Response:
    """200 while every replica is ready, else 503 with the names of those that are not."""
    description, missing = await readiness(state)
    if description is not None and not missing:
        return json({"status": "ok"})
    return json(
        {"status": "unavailable" if description is None else "degraded", "missing": missing}, 503, {"retry-after": "1"}
    )


@router.get("/v1/models", response_class=Response)
async def models(state: State) -> Response:
    """The names under which the pipeline's model is served."""
    names = state.model_names(await state.describe())
    return json({"object": "list", "data": [_model(name, state) for name in names]})


@router.get("/v1/models/{name:path}", response_class=Response)
async def model(name: str, state: State) -> Response:
    """One of them."""
    state.check_model(name, await state.describe())
    return json(_model(name, state))


def _model(name: str, state: ServerState) -> dict[str, Any]:
    """OpenAI's fields, then those of vLLM that its tools rely on (`vllm bench serve` asks for `root`)."""
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "omni_actors",
        "root": name,
        "parent": None,
    }


@router.get("/v1/audio/voices", response_class=Response)
async def voices(state: State) -> Response:
    """The voices that `audio.voice` and `voice` may name."""
    return json({"voices": list((await state.describe()).voices)})


@router.get("/v1/status", response_class=Response)
async def status(state: State) -> Response:
    """The pipeline and its replicas, for the web page and for people."""
    description = await state.describe()
    return json(
        {
            "pipeline": description.pipeline,
            "models": state.model_names(description),
            "modalities": description.modalities,
            "voices": description.voices,
            "sample_rate": description.sample_rate,
            "healthy": description.healthy,
            "in_flight": description.in_flight,
            "stages": [
                {
                    "stage": stage.stage,
                    "replica": stage.replica,
                    "state": stage.state,
                    "in_flight": stage.in_flight,
                    "counts": stage.counts,
                }
                for stage in description.stages
            ],
        }
    )


@router.get("/metrics", response_class=Response)
async def metrics(state: State) -> Response:
    """Prometheus text of the whole pipeline."""
    return Response(await state.client.metrics(), media_type=METRICS_TYPE)


@router.get("/v1/requests", response_class=Response)
async def requests(state: State, limit: Annotated[int, Query(ge=1, le=200)] = 20) -> Response:
    """Timelines of the requests that ended last, the newest first."""
    return json({"object": "list", "data": [as_json(timeline) for timeline in await state.client.recent(limit)]})


@router.get("/v1/requests/{request_id}/timeline", response_class=Response)
async def timeline(request_id: Annotated[str, Path(max_length=128)], state: State) -> Response:
    """When what happened to a request: one that runs, or one of the last 200 that ended."""
    try:
        return json(as_json(await state.client.timeline(request_id)))
    except InvalidRequest as error:
        raise HttpError(404, error.message, param="request_id", code="not_found") from None


# ---------------------------------------------------------------------------------------------------------------------
# Files: kept in memory for a while, to be named in chat messages


@router.post("/v1/files", response_class=Response)
async def upload(
    file: Annotated[UploadFile, File()], state: State, purpose: Annotated[str, Form(max_length=64)] = "user_data"
) -> Response:
    """Upload an image, audio or video for `{"type": "file", "file": {"file_id": ...}}`."""
    data = await file.read()
    if not data:
        raise HttpError(400, "The file is empty.", param="file", code="invalid_value")
    if len(data) > state.settings.media_bytes:
        raise HttpError(413, f"A file is limited to {state.settings.media_bytes} bytes.", param="file")
    return json(_file(state.files.add(file.filename or "file", purpose, data), state.files))


@router.get("/v1/files", response_class=Response)
async def files(state: State) -> Response:
    """All files that are there."""
    found = [_file(file, state.files) for file in state.files.list()]
    return json({"object": "list", "data": found, "has_more": False})


@router.get("/v1/files/{file_id}", response_class=Response)
async def file(file_id: str, state: State) -> Response:
    """One file, without its content."""
    found = state.files.find(file_id)
    if found is None:
        raise _no_file(file_id)
    return json(_file(found, state.files))


@router.delete("/v1/files/{file_id}", response_class=Response)
async def delete(file_id: str, state: State) -> Response:
    """Forget a file."""
    if not state.files.remove(file_id):
        raise _no_file(file_id)
    return json({"id": file_id, "object": "file", "deleted": True})


def _no_file(file_id: str) -> HttpError:
    return HttpError(404, f"There is no file {file_id[:100]!r}.", param="file_id", code="file_not_found")


def _file(file: UploadedFile, files: Files) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": len(file.data),
        "created_at": int(file.created),
        "expires_at": files.expires(file),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }
