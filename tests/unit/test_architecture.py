"""The page about the architecture agrees with the tree, and the tree does not grow."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

from scripts import lines_per_package
from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
CODE_LINES = 35_218
FILES = 255


@cache  # it reads the whole package
def sizes_of_files() -> list[lines_per_package.Size]:
    return lines_per_package.sizes()


def test_the_package_does_not_grow() -> None:
    sizes = sizes_of_files()
    assert sum(size.code for size in sizes) <= CODE_LINES
    assert len(sizes) <= FILES


def test_no_two_classes_have_the_same_name() -> None:
    sources = [path.read_text("utf-8") for path in lines_per_package.PACKAGE.rglob("*.py")]
    counts = Counter(name for source in sources for name in re.findall(r"^ *class (\w+)[(:]", source, re.M))
    assert len(counts) > 500
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_package_is_described() -> None:
    packages = sorted({size.package for size in sizes_of_files()} - {"(top level)"})
    assert len(packages) >= 13
    for package in packages:
        assert f"`{package}/" in PAGE


# Lists of what there is, and a hint at a shipped file; what a family needs is declared in its own folder.
NAMES_FAMILIES = {"engine/models/__init__.py", "engine/platform.py", "engine/prompt_processors.py"}


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
