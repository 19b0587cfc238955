"""A pipeline that the tests of a file disturb one after the other."""

from __future__ import annotations

import pytest

from tests.support.launcher import launched
from tests.support.load import disturbed_chain
from tests.support.waiting import until


@pytest.fixture(scope="module")
def disturbed_launcher():
    with launched(disturbed_chain(0.005), loses_stages=True) as launcher:
        yield launcher


@pytest.fixture
def disturbed(disturbed_launcher):
    """The same, healthy and idle again after each test."""
    yield disturbed_launcher
    until(lambda: disturbed_launcher.describe().healthy, 20, "every stage is ready")
    disturbed_launcher.wait_idle(20)
