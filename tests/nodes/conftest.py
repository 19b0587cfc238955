"""The network of two hosts, made once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.network import Network, Unavailable
from tests.support.processes import end_all


@pytest.fixture(scope="session")
def shared_network():
    try:
        network = Network()
    except Unavailable as error:
        pytest.skip(f"no network namespaces on this machine: {error}")
    with network:
        yield network


@pytest.fixture
def network(shared_network):
    """Two hosts; the cable is whole again after each test."""
    yield shared_network
    shared_network.heal()


@pytest.fixture
def cluster(network, short_path):
    made: list[Cluster] = []

    def make(data: Any) -> Cluster:
        made.append(Cluster(network, short_path, data))
        return made[-1]

    try:
        yield make
        network.heal()
        for one in made:
            one.end()
    finally:
        end_all(short_path)
