"""Dotted keys of the YAML: flattens mappings to them, refuses unknown ones, suggests the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, get_args, get_origin, get_type_hints

from msgspec import Struct

from omni_actors.errors import ConfigError


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ' Did you mean X?' for the nearest known word, else a list of the known words."""
    known = sorted(known)
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if nearest:
        return f" Did you mean {nearest[0]!r}?"
    return f" Known: {', '.join(known)}." if known else ""


def refuse_unknown_keys(data: Any, struct: type[Struct], path: str) -> None:
    """Raise `ConfigError` for an unknown key. Unlike msgspec's own check, it names the nearest valid key."""
    if not isinstance(data, dict):
        return  # the conversion reports the wrong type
    hints = get_type_hints(struct, include_extras=True)
    names = zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)
    fields = {encoded: hints[name] for name, encoded in names}
    for key, value in data.items():
        if key not in fields:
            raise ConfigError(f"Unknown key {join(path, str(key))!r}.{suggest(str(key), fields)}")
        inner, is_list = _inner_struct(fields[key])
        if inner is None:
            continue
        items = value if is_list and isinstance(value, list) else [value]
        for index, item in enumerate(items):
            name = item.get("name", index) if isinstance(item, dict) else index
            refuse_unknown_keys(item, inner, join(path, f"{key}.{name}" if is_list else str(key)))


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
