"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import guard
from tests.pipelines import RunningPipeline

if TYPE_CHECKING:
    from tests.http.servers import HttpPipeline

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The models are tiny and the processes many: threads of one model that wait for each other cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
REAL_PROCESSES = {"process", "chaos", "http", "launchers", "nodes"}  # folders


def pytest_configure() -> None:
    """Nothing that tests start outlives them, however they end."""
    guard.begin()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty folder with a path that is short enough for sockets; removed at the end, whatever is in it."""
    with tempfile.TemporaryDirectory(prefix="ot-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen2.5-Omni checkpoint (seed 0): the folder in OMNI_TEST_CHECKPOINT, else built for this run."""
    given = os.environ.get("OMNI_TEST_CHECKPOINT")
    if given:
        folder = Path(given)
        if not (folder / "model.safetensors").exists():
            pytest.fail(f"OMNI_TEST_CHECKPOINT={given} holds no checkpoint")
        return folder
    from tools.checkpoints import write_tiny
    from tools.checkpoints.measure import quiet_transformers

    quiet_transformers()
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny_qwen2_5_omni"
    write_tiny(folder, check=False)  # tests/e2e/test_reference.py checks what it answers
    return folder


@pytest.fixture(scope="session")
def tiny_http(tiny_checkpoint: Path) -> Iterator[HttpPipeline]:
    """The tiny Qwen2.5-Omni pipeline with all its processes and an HTTP server, started once per session of tests."""
    from tests.http.servers import HttpPipeline  # whoever runs a unit test need not wait for the clients' libraries

    with HttpPipeline("stage_configs/tiny_qwen2_5_omni.yaml", {"model": tiny_checkpoint}) as pipeline:
        yield pipeline


@pytest.fixture(scope="session")
def tiny_pipeline(tiny_http: HttpPipeline) -> RunningPipeline:
    """The same one, for tests to which its HTTP server does not matter."""
    return tiny_http


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that kill, stop and time real processes get a second chance on a busy machine; the report shows it (R)."""
    for item in items:
        if REAL_PROCESSES & set(item.path.parts):
            item.add_marker(pytest.mark.flaky(reruns=2))
