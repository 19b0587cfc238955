"""Routes of the web page."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

router = APIRouter()

PAGE_FILES = {  # path -> file and media type
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/audio.js": ("audio.js", "text/javascript"),
    "/common.js": ("common.js", "text/javascript"),
    "/timeline.js": ("timeline.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
}
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
        "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """One of the page's files."""
    name, media_type = PAGE_FILES[request.url.path]
    content = (resources.files("omni_actors.http_server") / "page" / name).read_bytes()
    return Response(content, media_type=media_type, headers=PAGE_HEADERS)


for path in PAGE_FILES:
    router.add_api_route(path, page, include_in_schema=False)
