"""Reads YAML by PyYAML's safe loader, with a bound on size, depth and what aliases repeat, and the line of each value.

Only what JSON could hold comes out: keys are texts as written, dates and times stay texts. Refused are other tags,
directives, repeated keys, numbers that are not finite or need more than 64 bits, and control characters.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from omni_actors.errors import ConfigError
from omni_actors.host.run_directory import check_readable

MAX_BYTES = 128 << 10  # PyYAML takes some 500 bytes of memory for each
MAX_SIZE = 256 << 10  # values and characters, with what aliases repeat
MAX_DEPTH = 50

Place = tuple[str | int, ...]  # the keys and indices that lead to a value

_TAG = "tag:yaml.org,2002:"
_TEXTS = {f"{_TAG}{name}" for name in ("str", "timestamp", "merge", "value")}
_SCALARS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float")}
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_DIRECTIVE = re.compile(r"^%", re.MULTILINE)  # libyaml takes seconds for many of them


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's, with `1e-3` as a number, as in YAML 1.2 and JSON."""


_Loader.add_implicit_resolver(f"{_TAG}float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789"))


class Document(NamedTuple):
    """What a text holds, and on which line each value stands, counted from 1."""

    value: Any
    lines: dict[Place, int]

    def line(self, place: Place) -> int | None:
        """The line of a value, or of the nearest one that holds it; `None` for the whole document."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place) if place else None


def read_file(path: Path) -> Document:
    """Read a YAML file. Raises `ConfigError`, naming the file, for one that cannot be read or is refused."""
    if check_readable(path, "the pipeline file") > MAX_BYTES:
        raise _too_large(str(path))
    try:
        with path.open("rb") as file:
            return read(file.read(MAX_BYTES + 1).decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not encoded in UTF-8: {error}.") from error
    except OSError as error:
        raise ConfigError(f"the pipeline file: cannot read {path}: {error.strerror}.") from error


def read(text: str, name: str) -> Document:
    """Read one YAML document.

    Args:
        name: of the file, or of whatever the text comes from, for errors.

    Raises:
        ConfigError: the text is too large or not YAML, or holds something that this module refuses.
    """
    if len(text) > MAX_BYTES:
        raise _too_large(name)
    if found := _DIRECTIVE.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ConfigError(f"{name}, line {line}: directives are not supported.")
    try:
        _check_depth(text, name)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            builder = _Builder(name, loader)
            return Document(builder.build(node, ()) if node is not None else None, builder.lines)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{name}{f', line {mark.line + 1}' if mark else ''}: not valid YAML: {problem}.") from error
    except (yaml.YAMLError, ValueError) as error:  # an escape such as "\U99999999" is a ValueError
        raise ConfigError(f"{name} is not valid YAML: {error}.") from error


def _check_depth(text: str, name: str) -> None:
    """Raise `ConfigError` for nesting that PyYAML's recursion would not survive."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            line = f", line {event.start_mark.line + 1}" if event.start_mark is not None else ""
            raise ConfigError(f"{name}{line}: more than {MAX_DEPTH} levels, one in the other.")


def _too_large(name: str) -> ConfigError:
    return ConfigError(f"{name} has more than {MAX_BYTES >> 10} KiB.", hint="A pipeline takes a few KiB of YAML.")


class _Builder:
    """Builds plain values from PyYAML's nodes. What an alias stands for is built again, and counts again."""

    def __init__(self, name: str, loader: Any) -> None:
        self._name = name
        self._loader = loader
        self._left = MAX_SIZE
        self.lines: dict[Place, int] = {}

    def build(self, node: yaml.Node, place: Place) -> Any:
        """The value of a node. Raises `ConfigError` for what is refused."""
        self.lines.setdefault(place, node.start_mark.line + 1)
        self._spend(node, 1)
        if len(place) >= MAX_DEPTH:
            raise self._refuse(node, f"more than {MAX_DEPTH} levels, one in the other")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.build(item, (*place, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node, place)
        raise self._refuse(node, f"the tag {node.tag!r} is not supported")

    def _spend(self, node: yaml.Node, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise self._refuse(node, f"more than {MAX_SIZE} values and characters, with those that aliases repeat")

    def _refuse(self, node: yaml.Node, problem: str) -> ConfigError:
        return ConfigError(f"{self._name}, line {node.start_mark.line + 1}: {problem}.")

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        own: dict[str, Any] = {}
        defaults: dict[str, Any] = {}  # of `<<`
        seen: set[str] = set()
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in _TEXTS | _SCALARS:
                raise self._refuse(key_node, "a key must be a text")
            key = self._text(key_node)
            if key in seen:
                raise self._refuse(key_node, f"the key {key[:80]!r} is given twice")
            seen.add(key)
            self.lines.setdefault((*place, key), key_node.start_mark.line + 1)
            value = self.build(value_node, (*place, key))
            if key_node.tag != f"{_TAG}merge":
                own[key] = value
                continue
            sources = value if isinstance(value, list) else [value]
            if not all(isinstance(source, dict) for source in sources):
                raise self._refuse(value_node, "<< takes a mapping, such as the alias *defaults, or a list of them")
            for source in reversed(sources):
                defaults |= source
        return {**defaults, **own}

    def _text(self, node: yaml.ScalarNode) -> str:
        self._spend(node, len(node.value))
        if found := _FORBIDDEN.search(node.value):  # by an escape, such as "\0"
            raise self._refuse(node, f"the control character {found[0]!a} is not allowed")
        return str(node.value)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text = self._text(node)
        if node.tag in _TEXTS:
            return text
        if node.tag not in _SCALARS:
            raise self._refuse(node, f"the tag {node.tag!r} is not supported")
        try:
            value = self._loader.construct_object(node)
        except (ValueError, LookupError) as error:
            raise self._refuse(node, f"{text[:80]!r} is no {node.tag.removeprefix(_TAG)}") from error
        if isinstance(value, float) and not math.isfinite(value):
            raise self._refuse(node, f"{text[:80]} is not a finite number")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise self._refuse(node, f"the number {text[:80]} does not fit in 64 bits")
        return value
