"""Compares the coverage of each package of omni_actors with its floor; exit code 1 if one is below.

python scripts/coverage_floors.py [--data FILE] [--package FOLDER]

It reads what `coverage combine` wrote (.coverage). One floor for everything would let a package go untested.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping
from pathlib import Path

import coverage
from coverage.exceptions import NoDataError

PACKAGE = Path(__file__).resolve().parents[1] / "omni_actors"
TOP_LEVEL = "(top level)"
# Percent of lines, some points below what the tests reach: room for a change, not for a new module without tests.
FLOORS = {
    TOP_LEVEL: 95,
    "cli": 92,
    "client": 92,
    "config": 96,
    "coordinator": 95,
    "engine": 92,
    "host": 95,
    "http_server": 93,
    "launcher": 88,
    "media": 80,  # its workers start with an environment of their own, in which nothing is measured
    "protocol": 96,
    "stage": 95,
    "telemetry": 95,
    "transport": 95,
}


def packages_of(package: Path) -> dict[str, str]:
    """Return the pattern of the files of each package in `package`, and of the modules that lie in itself."""
    folders = sorted(path.parent for path in package.glob("*/__init__.py"))
    return {TOP_LEVEL: f"{package}/*.py"} | {folder.name: f"{folder}/*" for folder in folders}


def percentages(data: Path, package: Path) -> dict[str, float]:
    """Return the covered percentage of the lines of each package; 0 for one that no test imports."""
    measured = coverage.Coverage(data_file=str(data), config_file=str(PACKAGE.parent / "pyproject.toml"))
    measured.load()
    found = {}
    for name, pattern in packages_of(package).items():
        inner = [f"{package}/*/*"] if name == TOP_LEVEL else None
        try:
            found[name] = measured.report(include=[pattern], omit=inner, file=io.StringIO())
        except NoDataError:
            found[name] = 0.0
    return found


def below_floor(found: Mapping[str, float], floors: Mapping[str, float] = FLOORS) -> list[str]:
    """Return a line for each package that is below its floor or has none."""
    lines = [f"{name} has no floor: give it one in scripts/coverage_floors.py" for name in found if name not in floors]
    return lines + [
        f"{name} is covered to {found.get(name, 0.0):.1f} %, its floor is {floor} %"
        for name, floor in floors.items()
        if found.get(name, 0.0) < floor
    ]


def main() -> int:
    """Print the percentages and what is below its floor; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(".coverage"), help="coverage's data (default: %(default)s)")
    parser.add_argument("--package", type=Path, default=PACKAGE, help="the package that was measured")
    options = parser.parse_args()
    found = percentages(options.data, options.package.resolve())
    print("coverage:", ", ".join(f"{name} {share:.1f}" for name, share in found.items()))
    lines = below_floor(found)
    for line in lines:
        print(f"coverage: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
