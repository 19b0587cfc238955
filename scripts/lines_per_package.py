"""Prints the lines of Python per package as a Markdown table, or writes it into docs/architecture.md.

python scripts/lines_per_package.py [--write]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "omni_actors"
PAGE = ROOT / "docs" / "architecture.md"
HEADER = "| Package | Lines |\n|---|---|\n"
OWN_ROW = {"coordinator/core", "engine/models"}  # packages inside packages
NOT_FRAMEWORK = {"engine/models", "http_server"}


def package_of(path: Path) -> str:
    """Return the package in whose row a file counts."""
    parts = path.relative_to(PACKAGE).parts[:-1]
    inner = "/".join(parts[:2])
    return inner if inner in OWN_ROW else parts[0] if parts else "(top level)"


def count_lines() -> dict[str, int]:
    """Count the lines of each package, then of the framework and of everything."""
    lines: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = package_of(path)
        lines[name] = lines.get(name, 0) + len(path.read_text(encoding="utf-8").splitlines())
    total = sum(lines.values())
    framework = total - sum(lines[name] for name in NOT_FRAMEWORK)
    return {**dict(sorted(lines.items())), "framework": framework, "total": total}


def render() -> str:
    """Format the table, lines rounded to tens so that small changes do not touch the page."""
    return HEADER + "\n".join(f"| `{name}` | {round(lines, -1):,} |" for name, lines in count_lines().items())


def parse(text: str) -> dict[str, int]:
    """Read the table back from the page."""
    table = text.partition(HEADER)[2].partition("\n\n")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {name: int(lines.replace(",", "")) for name, lines in rows}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table in docs/architecture.md")
    options = parser.parse_args()
    if not options.write:
        print(render())
        return 0
    head, header, rest = PAGE.read_text(encoding="utf-8").partition(HEADER)
    if not header:
        print(f"{PAGE.name} has no table of lines per package to replace.", file=sys.stderr)
        return 1
    tail = rest.partition("\n\n")[2]
    PAGE.write_text(f"{head}{render()}\n\n{tail}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
