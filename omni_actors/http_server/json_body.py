"""The JSON body of a route: read, bounded, decoded and described by one struct."""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request

from omni_actors.http_server.decoding import decode
from omni_actors.http_server.json_bounds import MAX_VALUES, SHORT, check_bounds

T = TypeVar("T")
REFERENCE = "#/components/schemas/{name}"


class JsonBody(Generic[T]):
    """A FastAPI dependency that gives a route its body as a struct.

    Args:
        max_values: members of objects and items of lists that a body may have.
    """

    def __init__(self, kind: type[T], max_values: int = MAX_VALUES) -> None:
        self._kind = kind
        self._max_values = max_values

    async def __call__(self, request: Request) -> T:
        """Decode the body. Raises `HttpError` 400 for the first error, 413 past the bounds."""
        pieces = [piece async for piece in request.stream() if piece]
        body = b"".join(pieces)  # does not copy a single piece, as it comes from the middleware
        return self._decode(body) if len(body) <= SHORT else await asyncio.to_thread(self._decode, body)

    def _decode(self, body: bytes) -> T:
        check_bounds(body, self._max_values)
        return decode(body, self._kind)

    def openapi(self) -> dict[str, Any]:
        """The route's `openapi_extra`."""
        schema = {"$ref": REFERENCE.format(name=self._kind.__name__)}
        return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def base64_string(data: bytes) -> msgspec.Raw:
    """Bytes in base64 as a string of JSON. msgspec takes twice as long for it, and does it on the server's loop."""
    return msgspec.Raw(b'"%b"' % binascii.b2a_base64(data, newline=False))


def schemas(kinds: Sequence[type]) -> dict[str, Any]:
    """The OpenAPI components of structs, and of all that they refer to, by name."""
    return msgspec.json.schema_components(kinds, ref_template=REFERENCE)[1]
