"""The floors of coverage: one per package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from coverage import CoverageData

from scripts import coverage_floors
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.nightly

FOUR_LINES = "a = 1\nb = 2\nc = 3\nd = 4\n"
EVERYWHERE = dict.fromkeys(coverage_floors.FLOORS, 100.0)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a floor for each of its packages, four lines in each."""
    made = tmp_path / "omni_actors"
    for name in coverage_floors.FLOORS:
        folder = made if name == coverage_floors.TOP_LEVEL else made / name
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("")
        (folder / "module.py").write_text(FOUR_LINES)
    return made


def measured(package: Path, lines: int, *, other: str = "engine") -> Path:
    """Coverage's data of tests that reach every line, but only the first `lines` of `other`."""
    data = CoverageData(str(package.parent / "data"))
    data.add_lines(
        {
            str(path): range(1, 5 if path.parent.name != other else lines + 1) if path.name == "module.py" else []
            for path in package.rglob("*.py")
        }
    )
    data.write()
    return package.parent / "data"


def run(package: Path, data: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/coverage_floors.py", "--data", str(data), "--package", str(package)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60)


def test_packages_at_their_floors_pass(package: Path) -> None:
    done = run(package, measured(package, 4))
    assert done.returncode == 0, done.stderr
    assert "engine 100.0" in done.stdout


def test_one_package_below_its_floor_fails_though_the_sum_is_high(package: Path) -> None:
    done = run(package, measured(package, 1))
    assert done.returncode == 1
    assert done.stderr == "coverage: engine is covered to 25.0 %, its floor is 92 %\n"


def test_the_modules_outside_of_any_package_count_by_themselves(package: Path) -> None:
    done = run(package, measured(package, 2, other=package.name))
    assert done.returncode == 1
    assert done.stderr == "coverage: (top level) is covered to 50.0 %, its floor is 95 %\n"


def test_a_package_that_no_test_imports_fails(package: Path) -> None:
    (package / "cli").rename(package.parent / "cli")
    data = measured(package, 4)
    (package.parent / "cli").rename(package / "cli")
    done = run(package, data)
    assert done.returncode == 1
    assert done.stderr == "coverage: cli is covered to 0.0 %, its floor is 92 %\n"


def test_a_new_package_needs_a_floor() -> None:
    assert coverage_floors.below_floor(EVERYWHERE) == []
    (line,) = coverage_floors.below_floor({**EVERYWHERE, "vision": 100.0})
    assert "vision has no floor" in line


def test_every_package_has_a_floor_of_at_least_eighty() -> None:
    assert set(coverage_floors.packages_of(REPOSITORY / "omni_actors")) == set(coverage_floors.FLOORS)
    assert min(coverage_floors.FLOORS.values()) >= 80
