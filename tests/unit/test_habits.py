"""Habits of the tests that no linter checks."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

TESTS = REPOSITORY / "tests"
NAMED_TUPLE = {"_asdict", "_fields", "_replace"}  # public, whatever their names look like
ALLOWED_PRIVATE = {
    # Moments between two threads that a test cannot hit from outside.
    "unit/test_inbound.py": {"_receive_control", "_waiting", "_wakeup"},
    # The kernel's arguments, compared with the module that computes the same.
    "unit/test_token2wav.py": {"_Activation"},
    # pytest ends fixtures, and xdist shares out files, in no public way.
    "support/sharing.py": {"_assign_work_unit", "_fixturemanager", "_request", "_split_scope"},
    # aiortc has no public way to be a bad client.
    "support/calls.py": {"_connection", "_protocols", "_remote_max_message_size"},
    # vLLM's own methods that the engine overrides.
    "unit/test_gpu_worker.py": {"_make_model_runner"},
}


@functools.cache
def modules() -> dict[Path, ast.Module]:
    """All modules of the tests, which takes seconds to read."""
    return {path.relative_to(TESTS): ast.parse(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}


Finder = Callable[[Path, ast.Module], Iterator[ast.AST]]


def imports_of_tests(path: Path, module: ast.Module) -> Iterator[ast.AST]:
    """Finds imports from a test module or a conftest; shared helpers are in tests/support."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        if any(name.startswith("tests.") and (".test_" in name or ".conftest" in name) for name in names):
            yield node


def private_attributes(path: Path, module: ast.Module) -> Iterator[ast.AST]:
    """Finds private attributes of anything but `self`."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and node.attr not in NAMED_TUPLE | ALLOWED_PRIVATE.get(path.as_posix(), set()):
                yield node


@pytest.mark.parametrize("find", [imports_of_tests, private_attributes], ids=lambda find: find.__name__)
def test_no_test_has(find: Finder) -> None:
    found = [f"tests/{path}:{node.lineno}" for path, module in modules().items() for node in find(path, module)]
    assert not found, "\n".join(found)


def test_scripts_and_benchmarks_find_what_they_import() -> None:
    """Most of them run by night or by hand, and no type checker reads them."""
    missing = []
    for path in (*REPOSITORY.glob("scripts/*.py"), *REPOSITORY.glob("benchmarks/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("omni_actors", "tests", "tools")):
                there = names_of(REPOSITORY / (node.module or "").replace(".", "/"))
                missing += [f"{path.name}: {node.module}.{name.name}" for name in node.names if name.name not in there]
    assert not missing


@functools.cache
def names_of(module: Path) -> set[str]:
    """What can be imported from a module or a package: other modules, and what its file defines or imports."""
    names = {path.stem for path in module.glob("*")}
    source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    for node in ast.walk(ast.parse(source.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.alias(asname=str(name)) | ast.alias(name=name):
                names.add(name)
    return names
