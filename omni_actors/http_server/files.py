"""Routes of uploaded files, which are kept in memory for a while so that chat messages can refer to them."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.http_server.bodies import Form, FormBody
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.fields import Strict
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.http_server.stores import UploadedFile


class UploadForm(Strict, frozen=True):
    """The fields of POST /v1/files besides the file."""

    purpose: Annotated[str, Meta(max_length=64)] = "user_data"


BODY = FormBody(UploadForm, {})


async def upload(request: Request, state: ServerState, form: Form[UploadForm]) -> Response:
    """Upload an image, audio or video for `{"type": "file", "file": {"file_id": ...}}`."""
    data = form.files[0]
    if not data:
        raise HttpError(400, "The file is empty.", param="file", code="invalid_value")
    if len(data) > state.settings.media_bytes:
        message = f"Each file is limited to {state.settings.media_bytes} bytes."
        raise HttpError(413, message, param="file", code="media_too_large")
    return json_response(_file(state.files.add(form.names[0], form.fields.purpose, data)))


async def files(request: Request, state: ServerState) -> Response:
    """All uploaded files."""
    found = [_file(file) for file in state.files.list()]
    return json_response({"object": "list", "data": found, "has_more": False})


async def file(request: Request, state: ServerState) -> Response:
    """One file, without its content."""
    file_id = request.path_params["file_id"]
    found = state.files.find(file_id)
    if found is None:
        raise _no_file(file_id)
    return json_response(_file(found))


async def delete(request: Request, state: ServerState) -> Response:
    """Delete a file."""
    file_id = request.path_params["file_id"]
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
