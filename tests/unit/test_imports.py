"""Imports run one way. The table is the design's; any other arrow fails."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "omni_actors"

# Module or package -> those of omni_actors that it may import (beside its own package).
BASE = {"errors", "envs", "addresses"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "envs": {"errors"},
    "addresses": {"errors"},
    "logs": BASE,
    "messages": BASE,
    "codec": BASE | {"messages"},
    "slurm": {"errors"},
    "config": BASE | {"messages", "slurm"},
    "outputs": BASE | {"messages"},
    "core": BASE | {"messages", "config", "codec"},
    "transport": BASE | {"logs", "messages", "config", "codec"},
    "observe": BASE | {"logs", "messages", "config", "core", "transport"},
    "stage": BASE | {"logs", "messages", "config", "codec", "core", "transport", "observe"},
    "prompts": BASE | {"messages", "codec", "outputs"},
    "streams": BASE | {"messages", "outputs"},
    "client": BASE | {"logs", "messages", "codec", "outputs", "prompts", "streams", "transport"},
    "coordinator_clients": BASE | {"logs", "messages", "config", "codec", "core", "transport"},
    "coordinator_stages": BASE | {"messages", "config", "codec", "core", "transport"},
    "coordinator_orders": BASE | {"logs", "messages", "config", "core", "transport", "coordinator_stages"},
    "coordinator": BASE
    | {"logs", "messages", "config", "codec", "core", "transport", "observe"}
    | {"coordinator_clients", "coordinator_stages", "coordinator_orders"},
    "supervisor": BASE | {"logs", "messages", "config", "core", "coordinator", "observe"},
    "coordinator_process": BASE | {"logs", "messages", "config", "coordinator", "supervisor", "transport", "observe"},
    "keeper": BASE | {"logs", "messages", "config", "coordinator_process", "node", "transport"},
    "agent": BASE | {"logs", "messages", "config", "codec", "node", "transport"},
    "node": BASE | {"logs", "messages", "config", "core", "stage", "transport"},
    "leash": set(),
    "keys": BASE | {"transport"},
    "ctl": BASE | {"messages", "client"},
    "top": BASE | {"messages", "client", "observe"},
    "trace": BASE | {"messages", "client", "observe"},
    "llm": BASE | {"messages", "client", "outputs", "transport"},
    "server": BASE | {"logs", "messages", "config", "client", "observe"},
    "launch": BASE | {"logs", "config", "core", "client", "agent", "keeper", "node", "server", "transport", "observe"},
    "replay": BASE | {"logs", "messages", "config", "codec", "stage"},
    "engine": BASE | {"logs", "messages", "config", "codec", "stage", "outputs"},
    "checkpoints": BASE | {"messages", "config"},
    "__init__": {"client", "llm", "outputs"},
}
ONLY_IN = {  # third-party module -> who may import it
    "zmq": {"transport"},
    "vllm": {"engine"},
    "torch": {"engine", "checkpoints"},
    "transformers": {"engine", "checkpoints"},
    "prometheus_client": {"observe", "top"},
    "opentelemetry": {"observe"},
    "rich": {"top", "trace"},
    "pickle": set(),
    "cloudpickle": set(),
    "marshal": set(),
    "shelve": set(),
    "dill": set(),
}
# What starts a stage's process is the only one that may reach for an engine, and only when it builds one.
LATE_ENGINE = PACKAGE / "stage" / "process.py"
PURE = {"zmq", "asyncio", "threading", "socket", "time", "queue", "subprocess", "logging", "os"}  # not in core/


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


def is_late(path: Path, node: ast.AST) -> bool:
    """Whether an import stands inside of a function."""
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    return any(function.lineno < node.lineno <= function.end_lineno for function in functions)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows(path: Path) -> None:
    me = owner(path)
    assert me in ALLOWED, f"{me} is new: say in this table what it may import"
    for name, node in imports(path):
        parts = name.split(".")
        if parts[0] == "omni_actors" and len(parts) > 1 and not parts[1].startswith("__"):
            target = parts[1]
            if path == LATE_ENGINE and target == "engine":
                assert is_late(path, node)
                continue
            assert target == me or target in ALLOWED[me], f"{path.name}:{node.lineno}: {me} may not import {target}"
        if parts[0] in ONLY_IN:
            assert me in ONLY_IN[parts[0]], f"{path.name}:{node.lineno}: {me} may not import {parts[0]}"
        if me == "core":
            assert parts[0] not in PURE, f"{path.name}:{node.lineno}: core is pure, {parts[0]} is not"


def test_the_table_has_no_cycle_and_no_stale_entry() -> None:
    assert set(ALLOWED) == {owner(path) for path in modules()}
    order: list[str] = []
    left = dict(ALLOWED)
    while left:
        ready = [name for name, targets in left.items() if targets <= set(order)]
        assert ready, f"cycle among {sorted(left)}"
        order += ready
        for name in ready:
            del left[name]


def loaded_by(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import omni_actors",
        "from omni_actors import AsyncOmniClient, OmniClient, OmniLLM",
        "import omni_actors.launch",
        "import omni_actors.coordinator_process",
        "import omni_actors.server.__main__",
        "import omni_actors.stage.process, omni_actors.stage.echo",
    ],
)
def test_light_parts_load_neither_torch_nor_vllm(code: str) -> None:
    assert not loaded_by(code) & {"torch", "vllm", "transformers", "triton"}


def test_core_loads_no_zmq() -> None:
    assert "zmq" not in loaded_by("import omni_actors.core.coordination")


def test_no_assert_validates_anything() -> None:
    """`python -O` strips them; errors are typed instead."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}"
