"""The YAML reader: what it takes, what it refuses with which words, and the bounds on what one text can cost."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from omni_actors.config.yaml_reader import MAX_BYTES, MAX_DEPTH, MAX_VALUES, Mark, read, read_file
from omni_actors.errors import ConfigError

MIB = 1 << 20


def value(text: str) -> Any:
    return read(text, "f.yaml").value


def refused(text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, "f.yaml")
    return caught.value.message


# -- what it takes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("# nothing but a comment", None),
        ("[~, null, yes, Off, TRUE, y]", [None, None, True, False, True, "y"]),
        ("[0, -3, +4, 1_000, 0x1f, 0o17]", [0, -3, 4, 1000, 31, 15]),
        ("[1.5, .5, 2., 1e3, -2.5e-3]", [1.5, 0.5, 2.0, 1000.0, -0.0025]),
        ("['5', \"yes\", !!str 5, '']", ["5", "yes", "5", ""]),
        ("[2026-11-22, 2026-11-22 10:00:00, 1:30, 010]", ["2026-11-22", "2026-11-22 10:00:00", "1:30", "010"]),
        ("{on: 1, 2026-11-22: 2, 5: 3}", {"on": 1, "2026-11-22": 2, "5": 3}),
        ("a: |\n  two\n  lines\n", {"a": "two\nlines\n"}),
        ("\ufeffa: ü€😀", {"a": "ü€😀"}),
    ],
)
def test_values_are_what_json_could_hold(text: str, expected: Any) -> None:
    assert read(text.encode(), "f.yaml").value == expected


def test_an_alias_is_a_copy() -> None:
    first, second = value("[&a {x: [1]}, *a]")
    assert first == second
    first["x"].append(2)
    assert second == {"x": [1]}


def test_merge_keys_give_defaults() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: {y: 5, <<: [*a, {x: 9, z: 1}]}\nd: {'<<': 1}"
    assert value(text) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 5, "z": 1}, "d": {"<<": 1}}


def test_a_document_knows_where_its_values_stand() -> None:
    document = read("a: 1\nb:\n  - c: 2\n    d: 3\n", "f.yaml")
    assert document.mark(("a",)) == Mark(1, 1)
    assert document.mark(("b", 0, "d")) == Mark(4, 5)
    assert document.mark(("b", 0, "missing")) == Mark(3, 5), "the nearest that holds it"
    assert document.mark(("missing",)) is None


# -- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "line 2, column 1: not valid YAML: "),
        ("a: 1\na: 2", "line 2, column 1: the key 'a' is given twice"),
        ("a: {b: 1, b: 2}", "line 1, column 11: the key 'b' is given twice"),
        ("{<<: {}, <<: {}}", "column 10: the key '<<' is given twice"),
        ("a: 1\n---\nb: 2", "line 2, column 1: a second document"),
        ("%YAML 1.2\n---\na: 1", "line 1, column 1: directives are not supported"),
        ("a: !!python/object:os.system x", "column 4: the tag 'tag:yaml.org,2002:python/object:os.system' is not"),
        ("a: !!set {b}", "the tag 'tag:yaml.org,2002:set' is not supported"),
        ("a: !!binary aGk=", "the tag 'tag:yaml.org,2002:binary' is not supported"),
        ("? [a]\n: b", "column 3: a key must be a text"),
        ("a: .nan", "line 1, column 4: .nan is not a finite number"),
        ("a: -.Inf", "-.Inf is not a finite number"),
        ("a: 1e999", "the number 1e999 is too large"),
        (f"a: {'9' * 6000}", "line 1, column 4: a number of 6000 characters is too long"),
        (f"a: 1{'0' * 30}", f"the number 1{'0' * 30} does not fit in 64 bits"),
        (f"{'k' * 300}: 1", "column 1: a key of 300 characters is too long"),
        ("a: \0", r"line 1, column 4: the control character '\x00' is not allowed"),
        ("a: 1\nb: x\x07", r"line 2, column 5: the control character '\x07' is not allowed"),
        ('a: "x\\0"', r"line 1, column 4: the control character '\x00' is not allowed"),
        ('"\\x1b": a', r"line 1, column 1: the control character '\x1b' is not allowed"),
        ('a: "\\ud800"', "line 1, column "),
        (b"a: b\nc: \xff", "line 2, column 4: not valid YAML: the text is not encoded in UTF-8"),
        ("a: b".encode("utf-16"), "not encoded in UTF-8"),
        ("a: *b", "column 4: there is no anchor &b before this alias"),
        ("a: &a [*a]", "column 8: the alias *a stands within what it names"),
        ("a: &a {b: {c: *a}}", "the alias *a stands within what it names"),
        ("a: {<<: 5}", "column 9: << takes a mapping"),
        ("a: {<<: [{}, 5]}", "<< takes a mapping"),
    ],
)
def test_what_is_refused_is_named_with_its_place(text: str | bytes, problem: str) -> None:
    message = refused(text)
    assert message.startswith("f.yaml, line ")
    assert problem in message


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "missing", "endless name"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x" * 300 if kind == "endless name" else "f.yaml")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # without a writer, for which an ordinary open() would wait
    elif kind == "device":
        path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="Cannot read the pipeline file"):
        read_file(path)


def test_a_name_with_a_nul_is_refused() -> None:
    with pytest.raises(ConfigError, match="NUL"):
        read_file(Path("f\0.yaml"))


# -- bounds -----------------------------------------------------------------------------------------------------------

BOMB = "\n".join(
    f"{name}: &{name} [{','.join([inner] * 10)}]"
    for name, inner in zip("abcdefghi", ("x", *(f"*{name}" for name in "abcdefgh")), strict=True)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 600 + "]" * 600, "line 1, column 51: more than 50 levels"),
        ("\n".join(" " * n + "a:" for n in range(600)), "line 51, column 51: more than 50 levels"),
        ("&a [[[[*a]]]]", "stands within what it names"),
        (f"a: &a {'[' * 30}{']' * 30}\nb: {'[' * 30}*a{']' * 30}", "more than 50 levels"),
        (BOMB, "more than 20000 values, those that aliases repeat included"),
        (f"a: &a {'x' * 10_000}\nb: [{','.join(['*a'] * 200)}]", "more than 1 MiB, with what aliases repeat"),
        (f"[{'x,' * (MAX_VALUES + 1)}]", "more than 20000 values"),
        ("".join(f"k{n}: 1\n" for n in range(MAX_VALUES + 1)), "more than 20000 values"),
        ("x" * (MAX_BYTES + 1), "has more than 1 MiB"),
        ("".join(f"%TAG !a{n}! b\n" for n in range(40_000)), "directives are not supported"),
    ],
    ids=["flow", "indent", "circle", "alias depth", "bomb", "text bomb", "list", "mapping", "bytes", "directives"],
)
def test_no_text_can_cost_much(text: str, problem: str) -> None:
    tracemalloc.start()
    try:
        assert problem in refused(text)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 64 * MIB


def test_what_is_just_within_the_bounds_is_read() -> None:
    assert len(value(f"[{'x,' * (MAX_VALUES - 1)}]")) == MAX_VALUES - 1
    deep = value("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    for _ in range(MAX_DEPTH - 1):
        (deep,) = deep
    assert deep == []
    assert value(f"'{'x' * (MAX_BYTES - 2)}'") == "x" * (MAX_BYTES - 2)


def test_a_huge_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole
    with pytest.raises(ConfigError, match="has more than 1 MiB"):
        read_file(path)
