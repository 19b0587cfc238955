"""The body of a request: received within limits, decoded into a struct, and described for OpenAPI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from omni_actors.http_server.decoding import MAX_VALUES, SHORT, check_bounds, decode
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.fields import Ignored, Strict, ignoring, refuse_effects
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.shares import reserve

T = TypeVar("T", bound=Strict)
REFERENCE = "#/components/schemas/{name}"
JSON, FORM = "application/json", "multipart/form-data"

FILE = "file"
LIST = "[]"  # at the end of the name of each item of a list in a form
MAX_FIELDS = 64  # of a form


class JsonBody(Generic[T]):
    """A body of JSON, decoded into a struct.

    Args:
        ignored: further fields that are accepted.
        max_values: members of objects and items of lists that a body may have.
    """

    def __init__(self, kind: type[T], ignored: Ignored, max_values: int = MAX_VALUES) -> None:
        self.kind = ignoring(kind, ignored)
        self._ignored = ignored
        self._max_values = max_values

    async def read(self, request: Request, settings: ServerSettings) -> T:
        """Receive and decode the body. Raises `HttpError` for the first thing that is wrong with it."""
        body = await _received(request, settings, JSON)
        return self.decoded(body) if len(body) <= SHORT else await asyncio.to_thread(self.decoded, body)

    def decoded(self, body: bytes) -> T:
        """Decode the body. Raises `HttpError` 400 or 413."""
        check_bounds(body, self._max_values)
        fields = decode(body, self.kind)
        refuse_effects(fields, self._ignored)
        return fields

    def described(self) -> dict[str, Any]:
        """The OpenAPI `requestBody`."""
        schema = {"$ref": REFERENCE.format(name=self.kind.__name__)}
        return {"required": True, "content": {JSON: {"schema": schema}}}


class Form(NamedTuple, Generic[T]):
    """A form that a client has sent."""

    fields: T
    files: list[bytes]
    names: list[str]


class FormBody(Generic[T]):
    """A multipart body: one or several files, and fields that are decoded into a struct.

    Args:
        ignored: further fields that are accepted.
        file: name of the field that holds a file; with `[]` at its end, of each of several.
        max_files: how many there may be, and at least one.
    """

    def __init__(self, kind: type[T], ignored: Ignored, file: str = FILE, max_files: int = 1) -> None:
        self.kind = ignoring(kind, ignored)
        self._ignored = ignored
        self._file = file
        self._max_files = max_files
        self._names = (file,) if max_files == 1 else (file, f"{file}{LIST}")

    async def read(self, request: Request, settings: ServerSettings) -> Form[T]:
        """Receive and decode the body. Raises `HttpError` for the first thing that is wrong with it."""
        body = await _received(request, settings, FORM)

        async def pieces() -> AsyncGenerator[bytes, None]:
            yield body

        parser = MultiPartParser(request.headers, pieces(), max_files=MAX_FIELDS, max_fields=MAX_FIELDS)
        parser.spool_max_size = len(body)  # a file on disk would fail uploads when the disk is full
        try:
            form = await parser.parse()
        except MultiPartException as error:
            raise HttpError(400, f"{error.message.rstrip('.')}.", code="http_400") from None
        fields: dict[str, Any] = {}
        files: list[bytes] = []
        names: list[str] = []
        try:
            for name, value in form.multi_items():
                if not isinstance(value, str):
                    if name not in self._names:
                        raise bad_field(name[:100], f"Only the field {self._file} may be a file.")
                    if len(files) == self._max_files:
                        raise bad_field(self._file, f"{self._file}: there may be {self._max_files} at most.")
                    files.append(await value.read())
                    names.append(value.filename or "file")
                elif name in self._names:
                    raise bad_field(self._file, f"{self._file}: must be a file.")
                elif name.endswith(LIST):
                    fields.setdefault(name.removesuffix(LIST), []).append(value)
                elif name in fields:
                    raise bad_field(name[:100], "The field is given twice.")
                else:
                    fields[name] = value
        finally:
            await form.close()
        if not files:
            raise bad_field(self._file, f"{self._file}: the field is missing.", "missing_required_parameter")
        decoded = decode(msgspec.json.encode(fields), self.kind)
        refuse_effects(decoded, self._ignored)
        return Form(decoded, files, names)

    def described(self) -> dict[str, Any]:
        """The OpenAPI `requestBody`."""
        own = msgspec.json.schema_components([self.kind], ref_template=REFERENCE)[1][self.kind.__name__]
        lists = {name for name, field in own["properties"].items() if "array" in str(field)}
        properties = {f"{name}{LIST}" if name in lists else name: field for name, field in own["properties"].items()}
        one: dict[str, Any] = {"type": "string", "format": "binary"}
        several = {"type": "array", "items": one, "minItems": 1, "maxItems": self._max_files}
        schema = {
            "type": "object",
            "properties": {self._file: one if self._max_files == 1 else several, **properties},
            "required": [self._file, *own.get("required", ())],
            "additionalProperties": False,
        }
        return {"required": True, "content": {FORM: {"schema": schema}}}


async def _received(request: Request, settings: ServerSettings, media_type: str) -> bytes:
    """The whole body, which counts towards the bytes of all requests.

    The type must be declared, because browsers send other types to foreign sites without asking.

    Raises:
        HttpError: 408, 413 or 415.
    """
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != media_type:
        message = f"The Content-Type is {given or 'missing'!r}; it must be {media_type}."
        raise HttpError(415, message, code="unsupported_media_type")
    limit, seconds = settings.body_bytes, settings.read_timeout
    too_large = HttpError(413, f"The body exceeds the limit of {limit} bytes.", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                size += len(piece)
                if size > limit:
                    raise too_large  # before it is reserved: a body that never fits must not say "retry"
                reserve(len(piece))
                pieces.append(piece)
    except ClientDisconnect:
        raise HttpError(400, "The connection ended before the body did.", code="incomplete_body") from None
    except TimeoutError:
        raise HttpError(408, f"The body did not arrive completely within {seconds:g} s.", code="body_timeout") from None
    return b"".join(pieces)
