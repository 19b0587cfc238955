"""Reads YAML into plain values, with a bound on everything: bytes, values, depth, and what aliases repeat.

Only what JSON could hold comes out: mappings with texts as keys, lists, texts, numbers, true, false and null. Dates and
times stay texts, as written. Anchors, aliases and merge keys (`<<: *defaults`) work; what an alias stands for is
copied, and counts again. Refused are tags, directives, repeated keys, numbers that are not finite or need more than 64
bits, and control characters. Every error names line and column.
"""

from __future__ import annotations

import copy
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from omni_actors.config.dotted_keys import Place
from omni_actors.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
MAX_DEPTH = 50

_LOADER: Final[type[Any]] = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_TEXT_TAGS = ("!", "tag:yaml.org,2002:str")
_MERGE = "<<"
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys((word for name in ("true", "yes", "on") for word in (name, name.title(), name.upper())), True),
    **dict.fromkeys((word for name in ("false", "no", "off") for word in (name, name.title(), name.upper())), False),
}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LONGEST_NUMBER, _LONGEST_KEY = 64, 256  # characters
_DIRECTIVE = re.compile(r"^%", re.MULTILINE)  # libyaml takes a minute for a MiB of them


class Mark(NamedTuple):
    """A place in a text, counted from 1."""

    line: int
    column: int


class Document(NamedTuple):
    """What a text holds, and where: the marks of all values that are written out, by their keys and indices."""

    value: Any
    marks: dict[Place, Mark]

    def mark(self, path: Place) -> Mark | None:
        """Where a value stands, or the nearest one that holds it; `None` for the whole document."""
        while path:
            if path in self.marks:
                return self.marks[path]
            path = path[:-1]
        return None


def read_file(path: Path) -> Document:
    """Read a YAML file. Raises `ConfigError`, naming the file, for one that cannot be read or is refused."""
    return read(_bytes_of(path), str(path))


def read(data: bytes | str, name: str) -> Document:
    """Read one YAML document.

    Args:
        name: of the file, or of whatever the text comes from, for errors.

    Raises:
        ConfigError: the text is too large or not YAML, or holds something that this module refuses.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{name} has more than {MAX_BYTES >> 20} MiB.", hint="A pipeline takes a few KiB of YAML.")
    text = data if isinstance(data, str) else _decoded(data, name)
    if found := _FORBIDDEN.search(text):
        raise _refusal(name, _mark_at(text, found.start()), f"the control character {found[0]!a} is not allowed")
    if found := _DIRECTIVE.search(text):
        raise _refusal(name, _mark_at(text, found.start()), "directives are not supported")
    try:
        return _Reader(name, text).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Mark(mark.line + 1, mark.column + 1) if mark is not None else Mark(1, 1)
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise _refusal(name, place, f"not valid YAML: {problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # an escape such as "\U99999999" is a ValueError
        raise ConfigError(f"{name} is not valid YAML: {error}.") from error


def _bytes_of(path: Path) -> bytes:
    if "\0" in str(path):
        raise ConfigError(f"Cannot read the pipeline file {str(path)!r}: the name holds a NUL character.")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer must not hang
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"Cannot read the pipeline file {path}: it is not a regular file.")
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"Cannot read the pipeline file {path}: {error.strerror}.") from error


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        mark = _mark_at(data.decode("latin-1"), error.start)
        raise _refusal(name, mark, "not valid YAML: the text is not encoded in UTF-8") from error


def _mark_at(text: str, position: int) -> Mark:
    return Mark(text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position))


def _refusal(name: str, mark: Mark, problem: str) -> ConfigError:
    return ConfigError(f"{name}, line {mark.line}, column {mark.column}: {problem}.")


@dataclass
class _Node:
    """A value, what it costs and where it stands. An alias to it before it is complete is a circle."""

    value: Any
    mark: Mark
    values: int = 1
    characters: int = 0
    depth: int = 1
    complete: bool = True
    merged: list[dict[str, Any]] = field(default_factory=list)  # a mapping's `<<`, in order of precedence


class _Reader:
    """Builds the values from the parser's events, and counts while it does, so that nothing large is ever built."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._events: Iterator[Any] = iter(yaml.parse(text, Loader=_LOADER))
        self._anchors: dict[str, _Node] = {}
        self._marks: dict[Place, Mark] = {}
        self._values = 0
        self._characters = 0

    def document(self) -> Document:
        value: Any = None
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._refuse(_mark(event), "a second document begins here; one is expected")
                value = self._node(next(self._events), ()).value
        return Document(value, self._marks)

    def _refuse(self, mark: Mark, problem: str) -> ConfigError:
        return _refusal(self._name, mark, problem)

    def _node(self, event: Any, path: Place) -> _Node:
        mark = _mark(event)
        if isinstance(event, yaml.AliasEvent):
            node = self._alias(str(event.anchor), mark, len(path))
        else:
            self._marks[path] = mark
            if isinstance(event, yaml.ScalarEvent):
                node = _Node(self._scalar(event, mark), mark, characters=len(event.value))
                self._count(node, mark, len(path))
            else:
                node = self._collection(event, mark, path)
            if event.anchor is not None:
                self._anchors[event.anchor] = node
        return node

    def _count(self, node: _Node, mark: Mark, above: int) -> None:
        self._values += node.values
        self._characters += node.characters
        if self._values > MAX_VALUES:
            raise self._refuse(mark, f"more than {MAX_VALUES} values, those that aliases repeat included")
        if self._characters > MAX_BYTES:
            raise self._refuse(mark, f"more than {MAX_BYTES >> 20} MiB, with what aliases repeat")
        if above + node.depth > MAX_DEPTH:
            raise self._refuse(mark, f"more than {MAX_DEPTH} levels, one in the other")

    def _alias(self, anchor: str, mark: Mark, above: int) -> _Node:
        found = self._anchors.get(anchor)
        if found is None:
            raise self._refuse(mark, f"there is no anchor &{anchor} before this alias")
        if not found.complete:
            raise self._refuse(mark, f"the alias *{anchor} stands within what it names")
        self._count(found, mark, above)
        # A copy: to set a value of one stage on the command line must not change another.
        return _Node(copy.deepcopy(found.value), mark, found.values, found.characters, found.depth)

    def _collection(self, event: Any, mark: Mark, path: Place) -> _Node:
        if event.tag is not None and event.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            raise self._refuse(mark, f"the tag {event.tag!r} is not supported")
        is_list = isinstance(event, yaml.SequenceStartEvent)
        node = _Node([] if is_list else {}, mark, complete=False)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._count(node, mark, len(path))
        if is_list:
            self._list(node, path)
        else:
            self._mapping(node, path)
        node.complete = True
        return node

    def _list(self, node: _Node, path: Place) -> None:
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            item = self._node(event, (*path, len(node.value)))
            node.value.append(item.value)
            _add(node, item)

    def _mapping(self, node: _Node, path: Place) -> None:
        keys: set[str] = set()
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            mark = _mark(event)
            if not isinstance(event, yaml.ScalarEvent):
                raise self._refuse(mark, "a key must be a text")
            key = self._key(event, mark)
            if key in keys:
                raise self._refuse(mark, f"the key {key!r} is given twice")
            keys.add(key)
            item = self._node(next(self._events), (*path, key))
            _add(node, item)
            if key == _MERGE and event.implicit[0]:
                node.merged = self._sources(item)
            else:
                self._marks[(*path, key)] = mark
                node.value[key] = item.value
        for source in node.merged:
            node.value = {**source, **node.value}

    def _key(self, event: Any, mark: Mark) -> str:
        self._count(_Node(None, mark, values=0, characters=len(event.value), depth=0), mark, 0)
        if event.anchor is not None or event.tag not in (None, *_TEXT_TAGS):
            raise self._refuse(mark, "a key must be a text, without a tag or an anchor")
        if len(event.value) > _LONGEST_KEY:
            raise self._refuse(mark, f"a key of {len(event.value)} characters is too long")
        self._check_text(event.value, mark)
        return str(event.value)

    def _sources(self, item: _Node) -> list[dict[str, Any]]:
        sources = item.value if isinstance(item.value, list) else [item.value]
        if not all(isinstance(source, dict) for source in sources):
            raise self._refuse(
                item.mark, "<< takes a mapping, most often an alias such as *defaults, or a list of them"
            )
        return sources

    def _scalar(self, event: Any, mark: Mark) -> Any:
        text: str = event.value
        self._check_text(text, mark)
        if event.tag is not None and event.tag not in _TEXT_TAGS:
            raise self._refuse(mark, f"the tag {event.tag!r} is not supported")
        if event.tag is not None or not event.implicit[0]:  # quoted
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _NOT_FINITE.fullmatch(text):
            raise self._refuse(mark, f"{text} is not a finite number")
        is_integer = _INTEGER.fullmatch(text) is not None
        if not is_integer and not _FLOAT.fullmatch(text):
            return text
        if len(text) > _LONGEST_NUMBER:
            raise self._refuse(mark, f"a number of {len(text)} characters is too long")
        return self._integer(text, mark) if is_integer else self._float(text, mark)

    def _integer(self, text: str, mark: Mark) -> int:
        number = int(text.replace("_", ""), 0)
        if not -(1 << 63) <= number < 1 << 64:
            raise self._refuse(mark, f"the number {text} does not fit in 64 bits")
        return number

    def _float(self, text: str, mark: Mark) -> float:
        number = float(text.replace("_", ""))
        if number in (float("inf"), float("-inf")):
            raise self._refuse(mark, f"the number {text} is too large")
        return number

    def _check_text(self, text: str, mark: Mark) -> None:
        if found := _FORBIDDEN.search(text):  # by an escape, such as "\0"
            raise self._refuse(mark, f"the control character {found[0]!a} is not allowed")


def _add(node: _Node, item: _Node) -> None:
    node.values += item.values
    node.characters += item.characters
    node.depth = max(node.depth, item.depth + 1)


def _mark(event: Any) -> Mark:
    return Mark(event.start_mark.line + 1, event.start_mark.column + 1)
