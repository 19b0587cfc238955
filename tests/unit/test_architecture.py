"""The page about the architecture agrees with the tree, the tree does not grow, and each library has its owner."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

from scripts import lines_per_package
from tests.support.commands import python
from tests.support.paths import REPOSITORY

PACKAGE = lines_per_package.PACKAGE
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
CODE_LINES = 34_898
FILES = 245


@cache  # it reads the whole package
def sizes_of_files() -> list[lines_per_package.Size]:
    return lines_per_package.sizes()


def test_the_package_does_not_grow() -> None:
    sizes = sizes_of_files()
    assert sum(size.code for size in sizes) <= CODE_LINES
    assert len(sizes) <= FILES


def test_no_two_classes_have_the_same_name() -> None:
    sources = [path.read_text("utf-8") for path in PACKAGE.rglob("*.py")]
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
    engine = PACKAGE / "engine"
    families = {path.parent for path in (engine / "models").glob("*/__init__.py")}
    shared = [path for path in engine.rglob("*.py") if path.parent not in families]
    shared.append(PACKAGE / "stage" / "processors.py")
    naming = {str(path.relative_to(PACKAGE)) for path in shared if "qwen" in path.read_text("utf-8").lower()}
    assert families
    assert naming <= NAMES_FAMILIES


CORE = PACKAGE / "coordinator" / "core"

ONLY_IN = {  # third-party module -> who may import it
    "zmq": {"transport"},
    "vllm": {"engine"},
    "torch": {"engine"},
    "transformers": {"engine"},
    "prometheus_client": {"telemetry", "cli"},
    "opentelemetry": {"telemetry"},
    "rich": {"cli", "client"},
    "pickle": set(),
    "cloudpickle": set(),
    "marshal": set(),
    "shelve": set(),
    "dill": set(),
}
# What is not in coordinator/core:
PURE = {"zmq", "asyncio", "threading", "socket", "time", "queue", "subprocess", "logging", "os"}


def test_libraries_are_imported_by_their_owners_only() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        me = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in re.findall(r"^ *(?:import|from) (\S+)", path.read_text("utf-8"), re.M):
            library = name.split(".")[0]
            assert library, f"{path}: relative import"
            if library in ONLY_IN:
                assert me in ONLY_IN[library], f"{path}: {me} may not import {library}"
            if CORE in path.parents:
                assert library not in PURE, f"{path}: the core is pure, {library} is not"


def test_light_parts_load_neither_torch_nor_vllm_and_a_launcher_no_coordinator() -> None:
    """It starts one in a process of its own."""
    program = """
import sys
import omni_actors.launch
print("omni_actors.coordinator.shell" in sys.modules)
from omni_actors import AsyncOmniClient, OmniClient, OmniLLM
import omni_actors.coordinator.process, omni_actors.http_server.__main__
import omni_actors.stage.process, omni_actors.stage.echo
print({"torch", "vllm", "transformers", "triton"}.intersection(sys.modules))
"""
    assert python("-c", program, check=True).stdout.splitlines() == ["False", "set()"]
