"""Habits of the tests that no linter checks."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import REPOSITORY

TESTS = REPOSITORY / "tests"
ALLOWED_PRIVATE = {
    # Moments between two threads that a test cannot hit from outside.
    "unit/test_inbound.py": {"_receive_control", "_waiting", "_wakeup"},
    # The kernel's arguments, compared with the module that computes the same.
    "unit/test_token2wav.py": {"_Activation"},
    # pytest ends fixtures, and xdist shares out files, in no public way.
    "support/sharing.py": {"_fixturemanager", "_request"},
    # aiortc has no public way to be a bad client.
    "support/calls.py": {"_connection", "_protocols", "_remote_max_message_size"},
    # vLLM's own methods that the engine overrides, and where it registers its kernels.
    "unit/test_gpu_worker.py": {"_make_model_runner"},
    "e2e/test_several_workers.py": {"_C"},
    # diffusers' own way to end a call early, as its manual has it.
    "e2e/test_diffusers_stage.py": {"_interrupt"},
}


def test_private_attributes_are_named_here() -> None:
    """Of anything but `self`."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "SLF001", "--output-format", "json"]
    done = subprocess.run([*command, str(TESTS)], capture_output=True, check=False, timeout=60)
    found: dict[str, set[str]] = {}
    for problem in json.loads(done.stdout):
        name = Path(problem["filename"]).relative_to(TESTS).as_posix()
        found.setdefault(name, set()).add(problem["message"].split("`")[1])
    assert found == ALLOWED_PRIVATE


def test_no_test_imports_another() -> None:
    """Shared helpers are in tests/support."""
    of_tests = re.compile(r"^ *(?:from|import) tests\.(?:.*\W)?(?:test_|conftest)", re.M)
    assert [path.name for path in TESTS.rglob("*.py") if of_tests.search(path.read_text())] == []


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
