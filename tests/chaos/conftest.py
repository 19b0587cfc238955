"""Pipelines of echo stages that lose processes while they work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.conftest import launch as launch  # the fixture


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.process)
