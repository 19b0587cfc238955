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
