"""Prints files, lines of code and all lines of each package as a Markdown table.

Lines of code are those without imports, docstrings, comments and blank lines.
"""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "omni_actors"
EXAMPLES = PACKAGE / "examples"  # a link, for the wheel
INSIDE = {"coordinator/core", "engine/models"}  # packages with a row of their own
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Size(NamedTuple):
    """Lines of a file."""

    package: str
    code: int
    lines: int


def files() -> Iterator[Path]:
    """The modules of the package."""
    return (path for path in sorted(PACKAGE.rglob("*.py")) if EXAMPLES not in path.parents)


def sizes() -> list[Size]:
    """The size of every file."""
    return [
        Size(package_of(path), code_lines(path.read_text(encoding="utf-8")), len(path.read_text().splitlines()))
        for path in files()
    ]


def package_of(path: Path) -> str:
    """The package in whose row a file counts."""
    parts = path.relative_to(PACKAGE).parts[:-1]
    inner = "/".join(parts[:2])
    return inner if inner in INSIDE else parts[0] if parts else "(top level)"


def code_lines(source: str) -> int:
    """Count the lines of a module that are neither imports nor docstrings, comments or blank."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
        for part in node.body if isinstance(node, DOCUMENTED) else ():
            if (
                isinstance(part, ast.Expr)
                and isinstance(part.value, ast.Constant)
                and isinstance(part.value.value, str)
            ):
                left_out.update(range(part.lineno, (part.end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - left_out)


def render() -> str:
    """The table, with the sums and the median of the lines of code of a file."""
    found = sizes()
    rows: dict[str, list[Size]] = defaultdict(list)
    for size in found:
        rows[size.package].append(size)
        rows["total"].append(size)
    total = rows.pop("total")
    table = ["| Package | Files | Code | Lines |", "|---|---|---|---|"]
    for name, own in [*sorted(rows.items()), ("total", total)]:
        code, lines = sum(size.code for size in own), sum(size.lines for size in own)
        table.append(f"| `{name}` | {len(own)} | {code:,} | {lines:,} |")
    return "\n".join(
        [*table, "", f"Median lines of code of a file: {statistics.median(size.code for size in total):g}"]
    )


if __name__ == "__main__":
    print(render())
