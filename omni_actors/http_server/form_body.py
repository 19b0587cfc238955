"""The multipart body of a route: one or several files, and fields that one struct describes."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from omni_actors.http_server.decoding import decode
from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.json_body import REFERENCE

T = TypeVar("T")
FILE = "file"
LIST = "[]"  # at the end of the name of each item of a list
MAX_FIELDS = 64


class Form(NamedTuple, Generic[T]):
    """What a client has sent."""

    fields: T
    files: list[bytes]
    names: list[str]

    @property
    def file(self) -> bytes:
        """The only file, or the first."""
        return self.files[0]


class FormBody(Generic[T]):
    """A FastAPI dependency that gives a route its files and its fields as a struct.

    Args:
        file: name of the field that holds a file; with `[]` at its end, of each of several.
        max_files: how many there may be, and at least one.
    """

    def __init__(self, kind: type[T], file: str = FILE, max_files: int = 1) -> None:
        self._kind = kind
        self._file = file
        self._max_files = max_files

    async def __call__(self, request: Request) -> Form[T]:
        """Decode the body. Raises `HttpError` 400 for the first error."""
        async with request.form(max_files=MAX_FIELDS, max_fields=MAX_FIELDS) as form:
            fields: dict[str, Any] = {}
            files: list[bytes] = []
            names: list[str] = []
            for name, value in form.multi_items():
                if not isinstance(value, str) and name in self._names:
                    if len(files) == self._max_files:
                        raise bad_field(self._file, f"{self._file}: there may be {self._max_files} at most.")
                    files.append(await value.read())
                    names.append(value.filename or "file")
                elif not isinstance(value, str):
                    raise bad_field(name[:100], f"Only the field {self._file} may be a file.")
                elif name in self._names:
                    raise bad_field(self._file, f"{self._file}: must be a file.")
                elif name.endswith(LIST):
                    fields.setdefault(name.removesuffix(LIST), []).append(value)
                elif name in fields:
                    raise bad_field(name[:100], "The field is given twice.")
                else:
                    fields[name] = value
        if not files:
            raise bad_field(self._file, f"{self._file}: the field is missing.", "missing_required_parameter")
        return Form(decode(msgspec.json.encode(fields), self._kind), files, names)

    @property
    def _names(self) -> tuple[str, ...]:
        return (self._file,) if self._max_files == 1 else (self._file, f"{self._file}{LIST}")

    def openapi(self) -> dict[str, Any]:
        """The route's `openapi_extra`."""
        own = msgspec.json.schema_components([self._kind], ref_template=REFERENCE)[1][self._kind.__name__]
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
        return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
