"""What the tests of real models compare with, and what makes engines in the tests' process bearable."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_actors.engine.platform import prepare

prepare()

from triton.runtime.interpreter import GridExecutor  # noqa: E402

from tests.support.qwen3_reference import Qwen3Reference  # noqa: E402
from tests.support.reference import Reference  # noqa: E402
from tests.support.servers import HttpPipeline  # noqa: E402
from tests.support.startup.untraced import untraced  # noqa: E402

# On the CPU, Triton's interpreter runs the kernels of vLLM, which take most of a step.
GridExecutor.__call__ = untraced(GridExecutor.__call__)


@pytest.fixture(scope="session", autouse=True)
def modules_are_no_garbage() -> None:
    """vLLM collects garbage eight times while an engine starts, 0.2 s each while all modules are looked through."""
    gc.freeze()


@pytest.fixture(scope="session")
def reference(tiny_checkpoint: Path) -> Reference:
    """transformers with the tiny checkpoint; loaded once, and changed by no test."""
    return Reference(tiny_checkpoint)


@pytest.fixture(scope="session")
def qwen3_reference(tiny_qwen3_checkpoint: Path) -> Qwen3Reference:
    """transformers with the tiny Qwen3-Omni checkpoint; loaded once, and changed by no test."""
    return Qwen3Reference(tiny_qwen3_checkpoint)


@pytest.fixture(scope="session")
def qwen3_http(tiny_qwen3_checkpoint: Path) -> Iterator[HttpPipeline]:
    """The tiny Qwen3-Omni pipeline with an HTTP server; few messages may be under way between two of its stages."""
    overrides = {"model": tiny_qwen3_checkpoint, "flow.edge_messages": 2, "flow.outbox_messages": 2}
    with HttpPipeline("stage_configs/tiny_qwen3_omni.yaml", overrides) as running:
        yield running


@pytest.fixture(scope="session")
def qwen3_tts_http(tiny_qwen3_tts: Path) -> Iterator[HttpPipeline]:
    """The tiny Qwen3-TTS pipeline, with voices of its own, and an HTTP server."""
    with HttpPipeline("stage_configs/tiny_qwen3_tts.yaml", {"model": tiny_qwen3_tts}) as running:
        yield running
