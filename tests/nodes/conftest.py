"""The network of two hosts, made once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.network import Network, Unavailable


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
