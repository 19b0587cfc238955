"""The YAML reader: what it takes, what it refuses with which words, and the bounds on what one text can cost."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from omni_actors.config.yaml_reader import MAX_BYTES, MAX_SIZE, read, read_file
from omni_actors.errors import ConfigError

MIB = 1 << 20


def value(text: str) -> Any:
    return read(text, "f.yaml").value


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, "f.yaml")
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("# nothing but a comment", None),
        ("[~, null, yes, Off, TRUE, y]", [None, None, True, False, True, "y"]),
        ("[0, -3, +4, 1_000, 0x1f]", [0, -3, 4, 1000, 31]),
        ("[1.5, .5, 2., 1e3, -2.5e-3, 1E-4]", [1.5, 0.5, 2.0, 1000.0, -0.0025, 0.0001]),
        ("['5', \"yes\", !!str 5, '']", ["5", "yes", "5", ""]),
        ("[2026-11-22, 2026-11-22 10:00:00, =, <<]", ["2026-11-22", "2026-11-22 10:00:00", "=", "<<"]),
        ("{on: 1, 2026-11-22: 2, 5: 3}", {"on": 1, "2026-11-22": 2, "5": 3}),
        ("a: |\n  two\n  lines\n", {"a": "two\nlines\n"}),
    ],
)
def test_values_are_what_json_could_hold(text: str, expected: Any) -> None:
    assert value(text) == expected


def test_a_document_knows_on_which_line_its_values_stand() -> None:
    document = read("a: 1\nb:\n  - c: 2\n    d: 3\n", "f.yaml")
    assert document.line(("a",)) == 1
    assert document.line(("b", 0, "d")) == 4
    assert document.line(("b", 0, "missing")) == 3, "the nearest that holds it"
    assert document.line(("missing",)) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "line 2: not valid YAML: "),
        ("a: 1\na: 2", "line 2: the key 'a' is given twice"),
        ("{<<: {}, <<: {}}", "line 1: the key '<<' is given twice"),
        ("a: 1\n---\nb: 2", "line 2: not valid YAML: expected a single document"),
        ("a: 1\n%YAML 1.2\n---\n", "line 2: directives are not supported"),
        ("a: !!python/object:os.system x", "line 1: the tag 'tag:yaml.org,2002:python/object:os.system' is not"),
        ("a: !!set {b}", "the tag 'tag:yaml.org,2002:set' is not supported"),
        ("a: !!int ''", "'' is no int"),
        ("a: !!bool maybe", "'maybe' is no bool"),
        ("? [a]\n: b", "line 1: a key must be a text"),
        ("a: .nan", "line 1: .nan is not a finite number"),
        ("a: 1e999", "1e999 is not a finite number"),
        (f"a: {'9' * 6000}", f"'{'9' * 80}' is no int"),
        (f"a: 1{'0' * 30}", f"the number 1{'0' * 30} does not fit in 64 bits"),
        ('a: "x\\0"', r"line 1: the control character '\x00' is not allowed"),
        ('"\\x1b": a', r"line 1: the control character '\x1b' is not allowed"),
        ('a: "\\ud800"', "line 1: "),
        ("a: *b", "line 1: not valid YAML: found undefined alias"),
        ("a: &a [*a]", "more than 50 levels"),
        ("a: {<<: 5}", "line 1: << takes a mapping"),
    ],
)
def test_what_is_refused_is_named_with_its_line(text: str, problem: str) -> None:
    message = refused(text)
    assert message.startswith("f.yaml, line ")
    assert problem in message


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "missing", "endless name", "latin-1", "UTF-16"])
def test_only_regular_files_of_text_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x" * 300 if kind == "endless name" else "f.yaml")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # without a writer, for which an ordinary open() would wait
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind in ("latin-1", "UTF-16"):
        path.write_text("a: ä", encoding=kind)
    with pytest.raises(ConfigError, match=r"regular file|cannot read|not encoded in UTF-8"):
        read_file(path)


def bomb(form: str) -> str:
    inner = ("{x: 1}", *(f"*{name}" for name in "abcdefgh"))
    return "\n".join(
        f"{name}: &{name} {form.format(','.join([item] * 10))}" for name, item in zip("abcdefghi", inner, strict=True)
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 600 + "]" * 600, "line 1: more than 50 levels"),
        ("[" * 60_000 + "]" * 60_000, "f.yaml"),
        ("\n".join(" " * n + "a:" for n in range(400)), "line 51: more than 50 levels"),
        (f"a: &a {'[' * 30}{']' * 30}\nb: {'[' * 30}*a{']' * 30}", "more than 50 levels"),
        (bomb("[{}]"), f"more than {MAX_SIZE} values and characters, with those that aliases repeat"),
        (bomb("{{<<: [{}]}}"), f"more than {MAX_SIZE} values and characters"),
        (f"a: &a {'x' * 10_000}\nb: [{','.join(['*a'] * 200)}]", f"more than {MAX_SIZE} values and characters"),
        (f"a: &a {{? {'x' * 10_000}}}\nb: [{','.join(['*a'] * 200)}]", f"more than {MAX_SIZE} values and characters"),
        ("x" * (MAX_BYTES + 1), "has more than 128 KiB"),
        ("".join(f"%TAG !a{n}! b\n" for n in range(8000)), "directives are not supported"),
    ],
    ids=["flow", "deeper", "indent", "alias depth", "bomb", "merges", "text bomb", "key bomb", "bytes", "directives"],
)
def test_no_text_can_cost_much(text: str, problem: str) -> None:
    tracemalloc.start()
    try:
        assert problem in refused(text)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 64 * MIB
