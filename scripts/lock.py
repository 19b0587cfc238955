"""Writes constraints.txt: the versions that CI installs. Users who install the package are not bound by it.

scripts/setup.sh --latest --venv /tmp/newest && /tmp/newest/bin/python scripts/lock.py --write

The file holds the version of every package that this environment has because pyproject.toml asks for it, directly or
through others, with the extras of EXTRAS. Without --write it is compared with pyproject.toml; exit code 1 if they
disagree.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "pyproject.toml"
LOCK = ROOT / "constraints.txt"
NOT_LOCKED = {"pip"}  # comes with the interpreter
# cuda has other versions of torch; fuzz is installed by hand
EXTRAS = ("cpu", "http", "image", "realtime", "webrtc", "trace", "docs", "test")
HEADER = """\
# The versions that CI installs (scripts/setup.sh), for the CPU build of vLLM on Python 3.11 and 3.12.
# Written by scripts/lock.py, whose first lines show how to renew it. Nothing else reads it.
"""


def direct_requirements(project: str) -> list[Requirement]:
    """Return what the text of a pyproject.toml asks for by itself, with the extras of EXTRAS."""
    data = tomllib.loads(project)["project"]
    texts = [*data["dependencies"], *(text for extra in EXTRAS for text in data["optional-dependencies"][extra])]
    requirements = [Requirement(text) for text in texts]
    return [item for item in requirements if canonicalize_name(item.name) != canonicalize_name(data["name"])]


def installed_versions(requirements: Iterable[Requirement]) -> dict[str, str]:
    """Return the version of every installed package that `requirements` lead to, without its local part (+cpu)."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(item.name, extra) for item in requirements for extra in ("", *item.extras)]
    while waiting:
        name, extra = waiting.pop()
        name = canonicalize_name(name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # scripts/fix_torchvision.py removes packages that cannot work without CUDA
        if name not in NOT_LOCKED:
            versions[name] = distribution.version.partition("+")[0]
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, needed) for needed in ("", *requirement.extras)]
    return versions


def read_lock(text: str) -> dict[str, str]:
    """Return the versions by name from the text of constraints.txt."""
    pins = [line.split("==") for line in text.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def disagreements(project: str, lock: str) -> list[str]:
    """Return a line for each direct requirement that is not locked, or locked at a version that it excludes."""
    locked = read_lock(lock)
    lines = []
    for requirement in direct_requirements(project):
        version = locked.get(canonicalize_name(requirement.name))
        if version is None:
            lines.append(f"{requirement} is not in constraints.txt")
        elif not requirement.specifier.contains(version, prereleases=True):
            lines.append(f"constraints.txt has {requirement.name}=={version}, pyproject.toml wants {requirement}")
    return lines


def main() -> int:
    """Write or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the versions of this environment")
    if parser.parse_args().write:
        versions = installed_versions(direct_requirements(PROJECT.read_text()))
        LOCK.write_text(HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(versions.items())))
    lines = disagreements(PROJECT.read_text(), LOCK.read_text())
    for line in lines:
        print(f"lock: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
