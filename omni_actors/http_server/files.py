"""Routes of uploaded files, which are kept in memory for a while so that chat messages can refer to them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from msgspec import Meta
from starlette.responses import Response

from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.form_body import Form, FormBody
from omni_actors.http_server.schema_fields import Strict
from omni_actors.http_server.state import State, json_response
from omni_actors.http_server.stores import UploadedFile

router = APIRouter()


class UploadForm(Strict, frozen=True):
    """The fields of POST /v1/files besides the file."""

    purpose: Annotated[str, Meta(max_length=64)] = "user_data"


UPLOAD = FormBody(UploadForm)


@router.post("/v1/files", response_class=Response, openapi_extra=UPLOAD.openapi())
async def upload(form: Annotated[Form[UploadForm], Depends(UPLOAD)], state: State) -> Response:
    """Upload an image, audio or video for `{"type": "file", "file": {"file_id": ...}}`."""
    data = form.file
    if not data:
        raise HttpError(400, "The file is empty.", param="file", code="invalid_value")
    if len(data) > state.settings.media_bytes:
        message = f"Each file is limited to {state.settings.media_bytes} bytes."
        raise HttpError(413, message, param="file", code="media_too_large")
    return json_response(_file(state.files.add(form.names[0], form.fields.purpose, data)))


@router.get("/v1/files", response_class=Response)
async def files(state: State) -> Response:
    """All uploaded files."""
    found = [_file(file) for file in state.files.list()]
    return json_response({"object": "list", "data": found, "has_more": False})


@router.get("/v1/files/{file_id}", response_class=Response)
async def file(file_id: str, state: State) -> Response:
    """One file, without its content."""
    found = state.files.find(file_id)
    if found is None:
        raise _no_file(file_id)
    return json_response(_file(found))


@router.delete("/v1/files/{file_id}", response_class=Response)
async def delete(file_id: str, state: State) -> Response:
    """Delete a file."""
    if not state.files.remove(file_id):
        raise _no_file(file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


def _no_file(file_id: str) -> HttpError:
    return HttpError(404, f"There is no file {file_id[:100]!r}.", param="file_id", code="file_not_found")


def _file(file: UploadedFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": len(file.data),
        "created_at": file.created,
        "expires_at": file.expires,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }
