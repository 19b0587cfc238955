"""What the tests of real models compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_actors.engine.platform import prepare

prepare()

from tests.support.reference import Reference  # noqa: E402


@pytest.fixture(scope="session")
def reference(tiny_checkpoint: Path) -> Reference:
    """transformers with the tiny checkpoint; loaded once, and changed by no test."""
    return Reference(tiny_checkpoint)
