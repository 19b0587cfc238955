"""Dotted keys of the YAML: flattens mappings to them, finds unknown ones, suggests the nearest valid one."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin, get_type_hints

from msgspec import Struct

NEAR = 0.8  # similarity of words that are the same but for a typo

Place = tuple[str | int, ...]  # the keys and indices that lead to a value


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ' Did you mean X?' for the nearest known word, else a list of the known words."""
    known = sorted(known)
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if nearest:
        return f" Did you mean {nearest[0]!r}?"
    return f" Known: {', '.join(known)}." if known else ""


def find_unknown_key(data: Any, struct: type[Struct], place: Place = ()) -> tuple[Place, str] | None:
    """Find the first key that `struct` does not have; `None` if there is none.

    Unlike msgspec's own check it suggests the nearest valid key. The place begins with `place`, that of `data`.
    """
    if not isinstance(data, dict):
        return None  # the conversion reports the wrong type
    fields = _fields(struct)
    for key, value in data.items():
        here = (*place, key)
        if key not in fields:
            return here, _suggest_key(key, fields)
        inner, is_list = _inner_struct(fields[key])
        if inner is None:
            continue
        in_list = is_list and isinstance(value, list)
        for item, where in [(item, (*here, index)) for index, item in enumerate(value)] if in_list else [(value, here)]:
            if found := find_unknown_key(item, inner, where):
                return found
    return None


def _suggest_key(key: str, fields: dict[str, Any]) -> str:
    """Suggest a field, or one of a section below it if that is much nearer: `temperature` belongs below `sampling`."""
    inner = {name: section for name, annotation in fields.items() if (section := _inner_struct(annotation)[0])}
    below = {field: f"{name}.{field}" for name, section in inner.items() for field in _fields(section)}
    if not difflib.get_close_matches(key, fields, n=1, cutoff=NEAR):
        for field in difflib.get_close_matches(key, below, n=1, cutoff=NEAR):
            return f" Did you mean {below[field]!r}?"
    return suggest(key, fields)


@functools.cache  # to evaluate the annotations takes milliseconds
def _fields(struct: type[Struct]) -> dict[str, Any]:
    """The annotations of a struct's fields, by the names that they have in the YAML."""
    hints = get_type_hints(struct, include_extras=True)
    return {
        encoded: hints[name]
        for name, encoded in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)
    }


def takes_text(key: str, struct: type[Struct]) -> bool:
    """Whether the value of a dotted key is a text, or one of several words, and never a number or a list."""
    section, _, rest = key.partition(".")
    annotation = _fields(struct)[section]
    if rest:
        inner, _ = _inner_struct(annotation)
        return inner is not None and takes_text(rest, inner)
    return not {int, float, bool, list, dict} & set(plain_types(annotation))


def plain_types(annotation: Any) -> Iterator[Any]:
    """All types of which an annotation is made."""
    yield get_origin(annotation) or annotation
    for argument in get_args(annotation):
        yield from plain_types(argument)


def annotation_at(place: Place, struct: type[Struct]) -> Any:
    """The annotation of the field of a struct, or of one within it, that holds the value at `place`."""
    annotation: Any = struct
    for step in place:
        if isinstance(step, int):
            continue  # an item: the annotation of its list has its type within
        inner, _ = _inner_struct(annotation)
        if inner is None or step not in _fields(inner):
            break
        annotation = _fields(inner)[step]
    return annotation


def _inner_struct(annotation: Any) -> tuple[type[Struct] | None, bool]:
    """Return the struct inside a field's type, and whether the field is a list of it.

    Uses `typing`, as `msgspec.inspect` crashed the interpreter in a later conversion (msgspec 0.22).
    """
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return annotation, False
    arguments = get_args(annotation)
    is_list = get_origin(annotation) is list
    for argument in arguments:
        found, nested_list = _inner_struct(argument)
        if found is not None:
            return found, is_list or nested_list
    return None, False


def join(path: str, key: str) -> str:
    """The dotted key of `key` below `path`, which is empty at the top."""
    return f"{path}.{key}" if path else key


def dotted(data: Any, place: Place) -> str:
    """The dotted key of the value to which keys and indices lead; stages by their names."""
    key = ""
    for step in place:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):  # it is missing, which may be the error to be reported
            data = None
        named = isinstance(step, int) and isinstance(data, dict) and isinstance(data.get("name"), str)
        key = join(key, data["name"] if named else str(step))
    return key


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys; items of a list are addressed by their name if they have one."""
    if isinstance(value, dict):
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat.update(flatten(item, join(prefix, str(key))))
        return flat or {prefix: {}}
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        flat = {}
        for item in value:
            flat.update(flatten(item, join(prefix, str(item["name"]))))
        return flat
    return {prefix: value}
