"""The Ray cluster that this host belongs to: which Ray is installed, connecting within a deadline, room for a group.

Ray is imported inside the functions: it is an extra, and importing it takes half a second.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from omni_actors import logs
from omni_actors.errors import ConfigError, StartupError
from omni_actors.host.processes import EXIT_FAILED

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

SUPPORTED = SpecifierSet(">=2.43,<3")  # from what vLLM's executor asks for to the next major release
TESTED = "2.60.0"
ADDRESS = "RAY_ADDRESS"  # Ray's own variable
PROBE_SECONDS = 5.0
CONNECT_SECONDS = 30.0

Bundle = Mapping[str, float]  # name of a resource -> amount, all on one node


def check_installed() -> None:
    """Raise `ConfigError` if Ray is missing, or if vLLM does not take its version."""
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise ConfigError("Ray is not installed.", hint="Run pip install 'omni_actors[ray]'.") from None
    try:
        known = SUPPORTED.contains(Version(version), prereleases=True)
    except InvalidVersion:
        known = False
    if not known:
        raise ConfigError(
            f"Ray {version} is installed; vLLM and this version of omni_actors take {SUPPORTED}.",
            hint=f"Run pip install ray=={TESTED} on all nodes of the cluster.",
        )


def connect(variables: Mapping[str, str], setup: str = "", seconds: float = CONNECT_SECONDS) -> None:
    """Connect this process to the cluster in RAY_ADDRESS, else to the one that runs on this host. Main thread only.

    Args:
        variables: environment of the actors that this process starts; Ray logs it.
        setup: dotted path of a function that these actors call before anything else.
        seconds: deadline, at which this process ends.

    Raises:
        ConfigError: Ray is missing or of another version than the cluster's, or there is no cluster to reach.
    """
    check_installed()
    address = os.environ.get(ADDRESS, "")
    if "://" in address:
        raise ConfigError(
            f"{ADDRESS} is {address!r}, the address of a client; only a node of the cluster can start a pipeline.",
            hint=f"Start it on a node, as a submitted job for instance, and set {ADDRESS} to HOST:PORT of the head.",
        )
    if address:
        _probe(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    where = address or "this host"
    ended_by = signal.getsignal(signal.SIGTERM)
    late = threading.Timer(seconds, _give_up, (where, seconds))
    late.daemon = True
    late.start()
    try:
        ray.init(
            address="auto",
            runtime_env={"env_vars": dict(variables)} | ({"worker_process_setup_hook": setup} if setup else {}),
            log_to_driver=False,
            logging_level="warning",
            namespace="omni_actors",
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"There is no Ray cluster to reach at {where}: {_first_line(error)}",
            hint=f"Start Ray on this host (`ray start`), or set {ADDRESS} to HOST:PORT of its head.",
        ) from error
    finally:
        late.cancel()
        signal.signal(signal.SIGTERM, ended_by)  # Ray has one of its own


def reserve(bundles: Sequence[Bundle], strategy: str, seconds: float, what: str) -> PlacementGroup:
    """Reserve resources of the connected cluster: one placement group with these bundles.

    Args:
        strategy: Ray's, such as STRICT_SPREAD, which puts every bundle on a node of its own.
        seconds: deadline; what a job that has just ended held takes a moment to become free.
        what: what needs it, for errors.

    Raises:
        ConfigError: the cluster is too small.
        StartupError: the cluster is large enough, but not free in time.
    """
    import ray

    nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    if problem := too_small(nodes, bundles, strategy):
        raise ConfigError(f"{what}: {problem}", hint="Add nodes to the Ray cluster, or change what the stages need.")
    group = ray.util.placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    if not group.wait(seconds):
        ray.util.remove_placement_group(group)
        free = ", ".join(f"{name} {amount:g}" for name, amount in _shown(ray.available_resources()).items())
        raise StartupError(
            f"{what}: the Ray cluster had no room for {_listed(bundles)} within {seconds:g} s; free in all: {free}.",
            hint="End what holds its resources (`ray status`), or give it more nodes.",
        )
    return group


def too_small(nodes: Sequence[Bundle], bundles: Sequence[Bundle], strategy: str) -> str:
    """Say why bundles cannot be placed even on an idle cluster of these nodes; "" if nothing is in the way.

    Only sums and the number of nodes are compared, so "" promises nothing: Ray knows the rest.
    """
    for name in sorted({name for bundle in bundles for name in bundle}):
        needed, present = (sum(each.get(name, 0.0) for each in some) for some in (bundles, nodes))
        if needed > present:
            return f"it needs {needed:g} x {name}, and the Ray cluster has {present:g}."
    if strategy == "STRICT_SPREAD" and len(nodes) < len(bundles):
        return f"it needs {len(bundles)} nodes, and the Ray cluster has {len(nodes)}."
    return ""


def _probe(address: str) -> None:
    """Raise `ConfigError` unless something listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), PROBE_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"There is no Ray cluster to reach at {address} ({ADDRESS}): {error}.",
            hint=f"Set {ADDRESS} to HOST:PORT of its head, or leave it out on a host that is a node of it.",
        ) from error


def _give_up(where: str, seconds: float) -> None:
    """End this process from another thread: the main one is inside Ray, where no signal interrupts it."""
    logs.complain(f"error: the Ray cluster at {where} did not answer within {seconds:g} s. See `ray status`.")
    os._exit(EXIT_FAILED)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _shown(resources: Bundle) -> dict[str, float]:
    """The resources that bundles ask for; Ray also counts nodes and memory as such."""
    return {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}


def _listed(bundles: Sequence[Bundle]) -> str:
    return " and ".join(
        "{" + ", ".join(f"{name}: {amount:g}" for name, amount in bundle.items()) + "}" for bundle in bundles
    )
