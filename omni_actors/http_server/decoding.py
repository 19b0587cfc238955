"""Decodes JSON into structs within bounds, and names the field at fault when it does not fit.

The decoder stops at the first error. Its messages quote what was sent; those made here do not, and they name the values
or fields that would be right, which the type's JSON schema knows.
"""

from __future__ import annotations

import binascii
import difflib
import functools
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from omni_actors.errors import suggest
from omni_actors.http_server.errors import HttpError, bad_field, too_large

T = TypeVar("T")

# Bounds of JSON, checked before it is decoded.
MAX_VALUES = 100_000  # members of objects and items of lists, after the first one of each
MAX_TOKEN_VALUES = 1_100_000  # the same where a list of token ids may be among them
MAX_CONTAINERS = 20_000  # lists and objects
MAX_TEXT_BYTES = 16 << 20  # all but media
MAX_QUOTES = 1_000_000  # around strings and in them
SHORT = 32_768  # bytes of a body that cannot exceed any of these

SEPARATORS = (b",", b":")
MEDIA_KEYS = frozenset({b"data", b"url", b"file_data", b"image_url"})  # whose strings are not decoded with the rest
MEDIA_BYTES = 1024  # a shorter string counts as text under any key

NAME_CHARACTERS = 100  # of an unknown field, in a message
PATH = re.compile(r"\$((?:\.\w+|\[\d+\]|\[\.\.\.\])+)")  # as msgspec writes it: $.messages[0].content
EXPECTED = re.compile(
    r"Expected `(?P<kinds>[\w |]+)`(?P<length> of length)?"
    r"(?: (?P<relation>[<>]=?) (?P<limit>\S+?)(?:\.0)?)?(?:, got `(?P<got>\w+)`)?"
)
RELATIONS = {"<=": "of at most {}", ">=": "of at least {}", "<": "below {}", ">": "above {}"}
TYPES = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
OF_A_KEY = "key` in `"
STEP = re.compile(r"\.(\w+)|\[")


# ---------------------------------------------------------------------------------------------------------------------
# Bounds of JSON

# The decoder holds the interpreter lock until it is done, and it counts the items of a list only when it has made them.
# `check_bounds` goes from quotation mark to quotation mark, and other threads can run in between.


def check_bounds(body: bytes, max_values: int) -> None:
    """Raise `HttpError` 413 if decoding this JSON would take long. Whether it is valid is not looked at."""
    if len(body) <= SHORT:
        return
    values = containers = text = position = begin = 0
    inside = is_medium = False
    key = b""
    for _ in range(MAX_QUOTES):
        quote = body.find(b'"', position)
        end = quote if quote >= 0 else len(body)
        if not inside:
            between = body[position:end] if end - position <= MAX_TEXT_BYTES else b""
            text += end - position
            values += between.count(b",")
            if between not in SEPARATORS:
                containers += between.count(b"[") + between.count(b"{")
            is_medium = key in MEDIA_KEYS and between.strip() == b":"
            inside, begin = True, end + 1
        elif quote < 0 or not _escaped(body, position, quote):
            length = end - begin
            text += 0 if is_medium and length > MEDIA_BYTES else length
            key = body[begin:end] if length < MEDIA_BYTES else b""
            inside = False
        if text > MAX_TEXT_BYTES:
            raise _beyond(f"{MAX_TEXT_BYTES} bytes without its media")
        if values > max_values:
            raise _beyond(f"{max_values} members of objects and items of lists")
        if containers > MAX_CONTAINERS:
            raise _beyond(f"{MAX_CONTAINERS} lists and objects")
        if quote < 0:
            return
        position = quote + 1
    raise _beyond(f"{MAX_QUOTES} quotation marks")


def _escaped(body: bytes, start: int, quote: int) -> bool:
    """Whether an odd number of backslashes, back to `start` at most, precedes the quotation mark."""
    if body[quote - 1 : quote] != b"\\":
        return False
    before = body[start:quote]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


def _beyond(what: str) -> HttpError:
    return too_large(f"The body has more than {what}; send less in one request.", code="body_too_large")


# ---------------------------------------------------------------------------------------------------------------------
# JSON into structs
#
# Messages of msgspec quote what was sent. Those made here do not, and name the values or fields that would be right,
# which the type's JSON schema knows.


def decode(data: bytes | msgspec.Raw, kind: type[T], where: str = "") -> T:
    """Decode JSON. Raises `HttpError` 400 for the first error.

    16.0 and "16" are accepted for 16, because some languages write their numbers so.

    Args:
        where: the field of the request that holds `data`, empty for the whole body.
    """
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise _of(str(error), kind, where) from None
    except RecursionError:
        reason = "its lists and objects are nested too deeply"
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        if reason == "Input data was truncated":
            reason = "it ends too early, or a \\u escape lacks its other half"
    message = f"The {where or 'body'} is not valid JSON: {reason}."
    raise HttpError(400, message, param=where or None, code="invalid_json")


def _of(message: str, kind: Any, where: str) -> HttpError:
    """Translate an error of msgspec: what is wrong, then at which path."""
    what, _, path = message.rpartition(" - at `")
    in_a_key = path.startswith(OF_A_KEY)
    path = path.removeprefix(OF_A_KEY)
    found = PATH.fullmatch(path, 0, len(path) - 1) if what else None
    path = found[1] if found else ""
    if not found:
        what = message
    if what.startswith("Object contains unknown field `"):
        name = what.partition("`")[2].removesuffix("`")[:NAME_CHARACTERS]
        nearest = suggest(name, _fields(kind, path))
        return _error(_join(where, f"{path}.{name}"), f"there is no such field.{nearest}", "unknown_parameter")
    if what.startswith("Object missing required field `"):
        name = what.partition("`")[2].removesuffix("`")
        return _error(_join(where, f"{path}.{name}"), "the field is missing.", "missing_required_parameter")
    if what.startswith("Invalid base64"):
        return _error(_join(where, path), "this is not valid base64.", "invalid_base64")
    if what.startswith("Invalid "):  # value or enum value
        choices = _choices(kind, path)
        if len(choices) == 1:
            return _error(_join(where, path), f"must be {choices[0]!r}.")
        given = what.partition("'")[2].removesuffix("'")[:NAME_CHARACTERS]
        close = difflib.get_close_matches(given, [str(choice) for choice in choices], n=1, cutoff=0.5)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        return _error(_join(where, path), f"must be one of {', '.join(map(repr, choices))}.{meant}")
    return _error(_join(where, path), f"{'each key ' if in_a_key else ''}{in_words(what)}.")


def in_words(what: str) -> str:
    """Say in words what msgspec expects, such as "Expected `int | null`, got `str`"."""
    found = EXPECTED.fullmatch(what)
    if found is None:
        return f"{what[:1].lower()}{what[1:].replace('`', '')}"
    kinds = found["kinds"].split(" | ")
    words = [TYPES.get(kind, kind) for kind in kinds]
    wanted = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    if found["relation"]:
        unit = {"str": " character", "array": " item", "object": " member"}[kinds[0]] if found["length"] else ""
        unit += "s" if unit and found["limit"] != "1" else ""
        wanted += f" {RELATIONS[found['relation']].format(found['limit'] + unit)}"
    got = f", not {TYPES.get(found['got'], found['got'])}" if found["got"] else ""
    return f"must be {wanted}{got}"


def _error(param: str, message: str, code: str = "invalid_value") -> HttpError:
    return bad_field(param, f"{param}: {message}", code) if param else HttpError(400, f"body: {message}", code=code)


def _join(where: str, path: str) -> str:
    path = path.replace("[...]", "")  # msgspec does not say which key of a mapping
    return f"{where}{path}" if where else path.removeprefix(".")


# ---------------------------------------------------------------------------------------------------------------------
# What a type allows at a path


def _fields(kind: Any, path: str) -> list[str]:
    return sorted({name for node in _nodes(kind, path) for name in node.get("properties", ())})


def _choices(kind: Any, path: str) -> list[Any]:
    choices = (choice for node in _nodes(kind, path) for choice in node.get("enum", ()))
    return [choice for choice in dict.fromkeys(choices) if choice is not None]


def _nodes(kind: Any, path: str) -> list[dict[str, Any]]:
    """The parts of the schema that describe what is at `path`, one for each branch of a union."""
    schema = _schema(kind)
    nodes = list(_branches(schema, schema))
    for name in STEP.findall(path):
        inner = [
            node.get("properties", {}).get(name, {}) if name else node.get("items", node.get("additionalProperties"))
            for node in nodes
        ]
        nodes = [branch for node in inner if isinstance(node, dict) for branch in _branches(node, schema)]
    return nodes


def _branches(node: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    for branch in node.get("anyOf", ()):
        yield from _branches(branch, schema)
    yield node


@functools.cache
def _schema(kind: Any) -> dict[str, Any]:
    return msgspec.json.schema(kind)


def base64_string(data: bytes) -> msgspec.Raw:
    """Bytes in base64 as a string of JSON. msgspec takes twice as long for it, and does it on the server's loop."""
    return msgspec.Raw(b'"%b"' % binascii.b2a_base64(data, newline=False))
