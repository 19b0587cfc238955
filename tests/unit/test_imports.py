"""Imports run one way: the layers are in `pyproject.toml` (import-linter); here are the third-party libraries."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.commands import python

PACKAGE = Path(__file__).resolve().parents[2] / "omni_actors"
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


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def owner(path: Path) -> str:
    """The package or module of the table that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> list[tuple[str, ast.AST]]:
    """Dotted names that a file imports, wherever in it."""
    found: list[tuple[str, ast.AST]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "omni_actors":
                found += [(f"omni_actors.{alias.name}", node) for alias in node.names]
            else:
                found.append((node.module or "", node))
    return found


def test_libraries_are_imported_by_their_owners_only() -> None:
    for path in modules():
        me = owner(path)
        for name, node in imports(path):
            library = name.split(".")[0]
            if library in ONLY_IN:
                assert me in ONLY_IN[library], f"{path}:{node.lineno}: {me} may not import {library}"
            if CORE in path.parents:
                assert library not in PURE, f"{path}:{node.lineno}: the core is pure, {library} is not"


def loaded_by(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = python("-c", program, check=True)
    return set(done.stdout.split())


def test_light_parts_load_neither_torch_nor_vllm() -> None:
    parts = ["launch", "coordinator.process", "http_server.__main__", "stage.process", "stage.echo"]
    code = "from omni_actors import AsyncOmniClient, OmniClient, OmniLLM\nimport omni_actors."
    assert not loaded_by(code + ", omni_actors.".join(parts)) & {"torch", "vllm", "transformers", "triton"}


def test_the_launcher_loads_no_coordinator() -> None:
    """It starts one in a process of its own."""
    program = (
        "import omni_actors.launch, sys; print([name for name in sys.modules if name.endswith('coordinator.shell')])"
    )
    done = python("-c", program, check=True)
    assert done.stdout == "[]\n"
