"""The network of two hosts, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.network import Network, Unavailable


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.process)


@pytest.fixture(scope="session")
def shared_network() -> Iterator[Network]:
    try:
        network = Network()
    except Unavailable as error:
        pytest.skip(f"no network namespaces on this machine: {error}")
    with network:
        yield network


@pytest.fixture
def network(shared_network: Network) -> Iterator[Network]:
    """Two hosts; the cable is whole again after each test."""
    yield shared_network
    shared_network.heal()
