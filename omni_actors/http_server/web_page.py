"""Routes of the web page."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

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
