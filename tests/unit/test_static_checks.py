"""The linter and the type checker leave nothing of the package out."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest

from tests.support.paths import REPOSITORY

TOOLS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]
DOCUMENTED = '"""Says what it is for."""\n\n'


def complaints(path: str, text: str) -> set[str]:
    """Returns the codes of ruff's complaints about a file of the repository that holds `text`."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format=json", f"--stdin-filename={path}", "-"]
    run = subprocess.run(command, cwd=REPOSITORY, input=text, capture_output=True, text=True, timeout=60)
    return {complaint["code"] for complaint in json.loads(run.stdout)}


@pytest.mark.parametrize("folder", ["omni_actors/engine", "omni_actors/engine/models/qwen2_5_omni", "tools"])
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("LIMIT = 1\n", "D100"),
        (f"{DOCUMENTED}class Part:\n    limit = 1\n", "D101"),
        (f'{DOCUMENTED}class Part:\n    """A part."""\n\n    def end(self) -> None:\n        return\n', "D102"),
        (f"{DOCUMENTED}def end() -> None:\n    return\n", "D103"),
        (f'{DOCUMENTED}LIMIT: int = ""  # type: ignore\n', "PGH003"),
    ],
    ids=["module", "class", "method", "function", "ignored type error"],
)
def test_what_is_public_needs_a_docstring_and_what_is_ignored_a_code(folder: str, text: str, code: str) -> None:
    assert complaints(f"{folder}/new.py", text) == {code}


def test_the_names_of_tests_are_their_documentation() -> None:
    assert complaints("tests/unit/test_new.py", "def test_that_one_is_odd():\n    assert 1 % 2\n") == set()


def test_the_type_checker_is_strict_about_every_module_of_ours() -> None:
    mypy = TOOLS["mypy"]
    assert mypy["strict"] is True
    assert set(mypy["packages"]) == {"omni_actors", "tools"}
    relaxed = [name for override in mypy["overrides"] for name in override["module"]]
    assert [name for name in relaxed if name.startswith(("omni_actors", "tools"))] == []


def test_the_type_checker_reads_torch_and_vllm() -> None:
    relaxed = {name.partition(".")[0] for override in TOOLS["mypy"]["overrides"] for name in override["module"]}
    assert not relaxed & {"torch", "vllm"}
