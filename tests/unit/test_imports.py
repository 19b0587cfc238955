"""Imports run one way: the layers are in `pyproject.toml` (import-linter); here are the third-party libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
        "import omni_actors.coordinator.process",
        "import omni_actors.http_server.__main__",
        "import omni_actors.stage.process, omni_actors.stage.echo",
    ],
)
def test_light_parts_load_neither_torch_nor_vllm(code: str) -> None:
    assert not loaded_by(code) & {"torch", "vllm", "transformers", "triton"}


def test_the_launcher_loads_no_coordinator() -> None:
    """It starts one in a process of its own."""
    program = (
        "import omni_actors.launch, sys; print([name for name in sys.modules if name.endswith('coordinator.shell')])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
