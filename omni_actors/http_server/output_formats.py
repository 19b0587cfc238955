"""The form that an answer's text must have: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Raw, json

from omni_actors.client.prompts import with_json_text
from omni_actors.http_server.decoding import decode
from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.schema_fields import ABSENT, MAX_FREE_FORM, NULLABLE_OBJECT, Strict, free_form, is_null
from omni_actors.protocol.payloads import StructuredOutputs

AnyObject = Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
SchemaName = Annotated[str, Meta(min_length=1, max_length=64)]
OptionalObject = Annotated[Raw, Meta(extra_json_schema={"type": NULLABLE_OBJECT})]
FORM_SCHEMA = {"anyOf": [{"$ref": "#/components/schemas/StructuredOutputs"}, {"type": "null"}]}
StructuredFields = Annotated[Raw, Meta(extra_json_schema=FORM_SCHEMA)]


class ResponseFormat(Strict, frozen=True, tag_field="type"):
    """A form by its type."""


class TextFormat(ResponseFormat, frozen=True, tag="text"):
    """Free text."""


class JsonObjectFormat(ResponseFormat, frozen=True, tag="json_object"):
    """Any JSON object."""


class JsonSchema(Strict, frozen=True):
    """A schema with its name."""

    name: SchemaName
    schema: AnyObject
    description: str | None = None  # ignored: the model does not see the schema
    strict: bool | None = None  # ignored: the schema always holds


class JsonSchemaFormat(ResponseFormat, frozen=True, tag="json_schema"):
    """JSON that fits a schema."""

    json_schema: JsonSchema


class StructuralTagFormat(ResponseFormat, frozen=True, tag="structural_tag"):
    """Free text with tags between which schemas hold, as in vLLM."""

    format: OptionalObject = ABSENT
    structures: Annotated[Raw, Meta(extra_json_schema={"type": ["array", "null"]})] = ABSENT
    triggers: Annotated[Raw, Meta(extra_json_schema={"type": ["array", "null"]})] = ABSENT


class FlatSchemaFormat(ResponseFormat, frozen=True, omit_defaults=True, tag="json_schema"):
    """The same, as `/v1/responses` has it."""

    name: SchemaName
    schema: AnyObject
    description: str | None = None  # ignored, as is the next one
    strict: bool | None = None


FlatFormat = TextFormat | JsonObjectFormat | FlatSchemaFormat
AnyResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


def flat_form(given: FlatFormat | None) -> StructuredOutputs | None:
    """The form that `text.format` of a response asks for. Raises `HttpError` if its schema is wrong."""
    match given:
        case JsonObjectFormat():
            return StructuredOutputs(json_object=True)
        case FlatSchemaFormat(schema=schema):
            return StructuredOutputs(json=_text(schema, "text.format.schema"))
        case _:
            return None


def output_form(response_format: AnyResponseFormat | None, structured: Raw) -> StructuredOutputs | None:
    """The form that the two fields ask for. Raises `HttpError` if both do, or one is wrong."""
    given = free_form(structured, dict[str, Any], "structured_outputs")
    if given is not None:
        if response_format is not None and not isinstance(response_format, TextFormat):
            raise bad_field("structured_outputs", "structured_outputs and response_format exclude one another.")
        return decode(json.encode(with_json_text(given)), StructuredOutputs, "structured_outputs")
    match response_format:
        case JsonObjectFormat():
            return StructuredOutputs(json_object=True)
        case JsonSchemaFormat(json_schema=JsonSchema(schema=schema)):
            return StructuredOutputs(json=_text(schema, "response_format.json_schema.schema"))
        case StructuralTagFormat(format=form, structures=structures, triggers=triggers):
            parts = {"format": form, "structures": structures, "triggers": triggers}
            tag = {name: part for name, part in parts.items() if not is_null(part)}
            text = Raw(json.encode({"type": "structural_tag", **tag}))
            return StructuredOutputs(structural_tag=_text(text, "response_format"))
        case _:
            return None


def fields_of(response_format: AnyResponseFormat | None) -> dict[str, str]:
    """The fields of the request that stand for those of `StructuredOutputs`, for errors."""
    return (
        {
            "structured_outputs.json": "response_format.json_schema.schema",
            "structured_outputs.structural_tag": "response_format",
        }
        if response_format is not None
        else {}
    )


def _text(value: Raw, name: str) -> str:
    if len(memoryview(value)) > MAX_FREE_FORM:
        raise bad_field(name, f"{name} is limited to {MAX_FREE_FORM} bytes.")
    if not bytes(memoryview(value)[:1]) == b"{":
        raise bad_field(name, f"{name} must be an object.")
    decode(value, dict[str, Any], name)  # a raw value may hold what is not UTF-8
    return bytes(value).decode()
