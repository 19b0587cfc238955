"""The multipart body of a route: one file, and fields that one struct describes."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from starlette.datastructures import UploadFile
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
    file: bytes


class FormBody(Generic[T]):
    """A FastAPI dependency that gives a route its file and its fields as a struct."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind

    async def __call__(self, request: Request) -> Form[T]:
        """Decode the body. Raises `HttpError` 400 for the first error."""
        async with request.form(max_files=1, max_fields=MAX_FIELDS) as form:
            fields: dict[str, Any] = {}
            file = None
            for name, value in form.multi_items():
                if name == FILE and isinstance(value, UploadFile):
                    file = await value.read()
                elif not isinstance(value, str):
                    raise bad_field(name[:100], "Only the field file may be a file.")
                elif name.endswith(LIST):
                    fields.setdefault(name.removesuffix(LIST), []).append(value)
                elif name in fields:
                    raise bad_field(name[:100], "The field is given twice.")
                else:
                    fields[name] = value
        if file is None:
            raise bad_field(FILE, "file: the field is missing.", "missing_required_parameter")
        return Form(decode(msgspec.json.encode(fields), self._kind), file)

    def openapi(self) -> dict[str, Any]:
        """The route's `openapi_extra`."""
        own = msgspec.json.schema_components([self._kind], ref_template=REFERENCE)[1][self._kind.__name__]
        lists = {name for name, field in own["properties"].items() if "array" in str(field)}
        properties = {f"{name}{LIST}" if name in lists else name: field for name, field in own["properties"].items()}
        schema = {
            "type": "object",
            "properties": {FILE: {"type": "string", "format": "binary"}, **properties},
            "required": [FILE, *own.get("required", ())],
            "additionalProperties": False,
        }
        return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
