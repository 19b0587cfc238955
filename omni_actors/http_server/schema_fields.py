"""Fields that request bodies are made of, and values of fields that have no effect here."""

from __future__ import annotations

import functools
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from msgspec import Meta, Raw, Struct, field, json

from omni_actors.http_server.decoding import decode
from omni_actors.http_server.errors import bad_field
from omni_actors.protocol.fields import Priority, Seed
from omni_actors.protocol.payloads import StageParams

T = TypeVar("T")

MAX_TEXT = 4_000_000  # characters
MAX_FREE_FORM = 65_536  # bytes of `stage_params` and of `metadata`
MAX_NO_EFFECT = 64  # bytes of a value that may have no effect
NULLABLE_OBJECT = ["object", "null"]

ABSENT: Any = field(default_factory=lambda: Raw(b"null"))  # a factory, because OpenAPI could not show the value

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
OptionalText = Text | None

# A long string, such as base64, stays in the body until `media.py` reads it.
LongString = Annotated[Raw, Meta(extra_json_schema={"type": "string"})]
OptionalLongString = Annotated[Raw, Meta(extra_json_schema={"type": ["string", "null"]})]
Timeout = Annotated[float, Meta(gt=0, le=86400)]
PARAMS_SCHEMA = {"$ref": "#/components/schemas/StageParams"}
ParamsByStage = Annotated[Raw, Meta(extra_json_schema={"type": NULLABLE_OBJECT, "additionalProperties": PARAMS_SCHEMA})]
Anything = Annotated[Raw, Meta(extra_json_schema={})]
Metadata = Annotated[Raw, Meta(extra_json_schema={"type": NULLABLE_OBJECT, "additionalProperties": {"type": "string"}})]

# Fields of others that ask for what is not here. These are the values that ask for nothing; `refuse_effects` refuses
# the rest.
Null = Annotated[Raw, Meta(extra_json_schema={"enum": [None]})]
Off = Annotated[Raw, Meta(extra_json_schema={"enum": [None, False]})]
On = Annotated[Raw, Meta(extra_json_schema={"enum": [None, True]})]
Switch = Annotated[Raw, Meta(extra_json_schema={"enum": [None, False, True]})]  # either way
Zero = Annotated[Raw, Meta(extra_json_schema={"enum": [0, None]})]  # [None, 0] equals the values of `Off`, and Python
One = Annotated[Raw, Meta(extra_json_schema={"enum": [1, None]})]  # would take that type in its place
EmptyText = Annotated[Raw, Meta(extra_json_schema={"enum": [None, ""]})]
EmptyList = Annotated[Raw, Meta(extra_json_schema={"enum": [None, []]})]
EmptyObject = Annotated[Raw, Meta(extra_json_schema={"enum": [None, {}]})]
NoTool = Annotated[Raw, Meta(extra_json_schema={"enum": [None, "none", "auto"]})]


class Strict(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A part of a body; unknown fields are errors."""


class Submission(Strict, frozen=True, kw_only=True):
    """The fields of all requests."""

    model: str | None = None  # the first of those that are served
    seed: Seed | None = None
    stage_params: ParamsByStage = ABSENT
    timeout: Timeout | None = None
    priority: Priority | None = None

    def params_by_stage(self) -> dict[str, StageParams]:
        """Decode `stage_params`. Raises `HttpError` that names the stage and the field."""
        return decoded_params(self.stage_params)


def decoded_params(stage_params: Raw) -> dict[str, StageParams]:
    """Parameters by stage. Raises `HttpError` that names the stage and the field."""
    found = {}
    for stage, params in (free_form(stage_params, dict[str, Raw], "stage_params") or {}).items():
        where = f"stage_params.{stage[:64]}"
        found[stage] = decode(params, StageParams, where)
        if found[stage].prompt_logprobs is not None:  # most answers have no place for them
            field = f"{where}.prompt_logprobs"
            message = f"{field} is not supported. Give prompt_logprobs as a field of a chat or a text completion."
            raise bad_field(field, message, "unsupported_parameter")
    return found


def refuse_effects(body: Strict, hints: dict[str, str], where: str = "") -> None:
    """Raise `HttpError` 400 for the first field with a value other than those of its type above.

    Args:
        hints: what to do instead, by field.
        where: the field of the request that holds `body`, empty for the whole body.
    """
    for name, allowed in values_without_effect(type(body)).items():
        value: Raw = getattr(body, name)
        if is_null(value) or (len(memoryview(value)) <= MAX_NO_EFFECT and decode(value, object) in allowed):
            continue
        param = f"{where}.{name}" if where else name
        only = [json.encode(choice).decode() for choice in allowed if choice is not None]
        hint = hints.get(name, "") or (f"Leave it out, or give {' or '.join(only)}." if only else "Leave it out.")
        raise bad_field(param, f"{param} is not supported. {hint}", "unsupported_parameter")


@functools.cache
def values_without_effect(kind: type[Strict]) -> dict[str, list[Any]]:
    """The values that are accepted for fields which ask for what is not here, by field."""
    found = {}
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        for meta in get_args(annotation)[1:]:
            if isinstance(meta, Meta) and "enum" in (meta.extra_json_schema or {}):
                found[name] = (meta.extra_json_schema or {})["enum"]
    return found


def free_form(value: Raw, kind: type[T], name: str) -> T | None:
    """Decode a field of any form, such as `metadata`. Raises `HttpError` if it does not fit or is long."""
    if len(memoryview(value)) > MAX_FREE_FORM:
        raise bad_field(name, f"{name} is limited to {MAX_FREE_FORM} bytes.")
    return None if is_null(value) else decode(value, kind, name)


def is_null(value: Raw) -> bool:
    """Whether a field is null, or absent."""
    return bytes(memoryview(value)[:5]) == b"null"
