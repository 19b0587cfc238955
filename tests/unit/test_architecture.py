"""The page about the architecture agrees with the tree: the sizes of its table, and that it leaves out no package."""

from __future__ import annotations

import pytest

from scripts import lines_per_package

PAGE = lines_per_package.PAGE.read_text(encoding="utf-8")


def test_the_table_has_a_row_for_every_package() -> None:
    assert list(lines_per_package.parse(PAGE)) == list(lines_per_package.count_lines())


@pytest.mark.parametrize("package", lines_per_package.count_lines())
def test_lines_per_package_are_within_ten_percent(package: str) -> None:
    written = lines_per_package.parse(PAGE)[package]
    counted = lines_per_package.count_lines()[package]
    assert written == pytest.approx(counted, rel=0.1), "run python scripts/lines_per_package.py --write"


def test_every_package_is_described_before_the_table() -> None:
    text = PAGE.partition(lines_per_package.HEADER)[0]
    packages = [name for name in lines_per_package.count_lines() if (lines_per_package.PACKAGE / name).is_dir()]
    assert len(packages) >= 13
    for package in packages:
        assert f"`{package}/" in text


# Lists of what there is, and a hint at a shipped file; what a family needs is declared in its own folder.
NAMES_FAMILIES = {"engine/models/registry.py", "engine/platform.py", "engine/chat_template.py"}


def test_only_a_familys_own_folder_knows_it() -> None:
    engine = lines_per_package.PACKAGE / "engine"
    families = {path.parent for path in (engine / "models").glob("*/__init__.py")}
    shared = [path for path in engine.rglob("*.py") if path.parent not in families]
    shared.append(lines_per_package.PACKAGE / "stage" / "processors.py")
    naming = {
        str(path.relative_to(lines_per_package.PACKAGE)) for path in shared if "qwen" in path.read_text("utf-8").lower()
    }
    assert families
    assert naming <= NAMES_FAMILIES
