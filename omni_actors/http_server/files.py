"""Routes of uploaded files, which are kept in memory for a while so that chat messages can refer to them."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.http_server.bodies import Form, FormBody
from omni_actors.http_server.errors import HttpError, bad_field, too_large
from omni_actors.http_server.fields import Strict
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.http_server.stores import UploadedFile

MAX_NAME_BYTES = 255


class UploadForm(Strict, frozen=True):
    """The fields of POST /v1/files besides the file."""

    purpose: Annotated[str, Meta(max_length=64)] = "user_data"


BODY = FormBody(UploadForm, {})


async def upload(request: Request, state: ServerState, form: Form[UploadForm]) -> Response:
    """Upload an image, audio or video for `{"type": "file", "file": {"file_id": ...}}`."""
    data = form.files[0]
    if not data:
        raise bad_field("file", "The file is empty.")
    if len(data) > state.settings.media_bytes:
        raise too_large(f"Each file is limited to {state.settings.media_bytes} bytes.", "file")
    if len(data) > state.settings.files_bytes:
        raise too_large(f"All files together are limited to {state.settings.files_bytes} bytes.", "file")
    name = form.names[0]
    if len(name.encode()) > MAX_NAME_BYTES:
        raise bad_field("file", f"The file's name has more than {MAX_NAME_BYTES} bytes.")
    now = time.time()
    expires = int(now + state.settings.file_seconds)
    file = UploadedFile(f"file-{uuid.uuid4().hex}", name, form.fields.purpose, data, int(now), expires)
    state.files.add(file.id, file, len(data))
    return json_response(_file(file))


async def files(request: Request, state: ServerState) -> Response:
    """All uploaded files."""
    found = [_file(file) for file in state.files.values()]
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
    times = {"created_at": file.created, "expires_at": file.expires}
    about = {"filename": file.name, "purpose": file.purpose, "status": "processed"}
    return {"id": file.id, "object": "file", "bytes": len(file.data), **times, **about}
