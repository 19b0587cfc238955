"""Runs one pipeline on a Ray cluster: `python -m omni_actors.cli.ray_job CONFIG [ARGUMENTS of omni-actors launch]`.

It reserves a placement group with a bundle on a node of its own for each node of the pipeline, has an actor on each of
them start a launcher (launcher/ray_node.py), prints what the launchers print, and ends everything when one of them
ends, when it gets a signal, or when it ends itself, however it does. Run it on a node of the cluster: as a script
(launch/ray.sh) or as a submitted job.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from omni_actors import config, flags, launch, logs
from omni_actors.config import PipelineConfig, placement, replica_devices
from omni_actors.config.placement import MOST_GPUS
from omni_actors.errors import ConfigError, OmniError, StartupError
from omni_actors.host import ray_cluster
from omni_actors.host.processes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from omni_actors.launcher.ray_node import ACTOR_VARIABLES, LauncherOutput, RayNode, describe_end
from omni_actors.transport.curve import ALLOWED, CLUSTER, OPERATORS, PUBLIC, SECRET, load_keys, make_cluster

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup

PORT = "OMNI_PORT"  # as for the other launch scripts; a free one by default, since jobs share nodes
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_SECONDS = 0.2  # between two looks for a signal
START_SECONDS = 60.0  # for Ray to start an actor
KILLED_SECONDS = 10.0  # until a launcher that does not end in time is reported as killed
OWN_FLAGS = ("node_rank", "master_addr", "master_port", "node_addr")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit code of the launcher that ended first, or of another one that failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = launch.parser().parse_args(given)
    try:
        logs.configure("ray")
        if options.check:
            return launch.main(given)
        pipeline = _load(options)
        keys = key_files(pipeline.coordinator.keys_dir)
        ray_cluster.connect({**_import_path(), **ACTOR_VARIABLES})
        try:
            return _Job(pipeline, _without_keys(given), keys).run()
        finally:
            import ray

            ray.shutdown()
    except ConfigError as error:
        logs.complain(f"configuration error: {error}")
        return EXIT_USAGE
    except KeyboardInterrupt:  # before any launcher runs
        return EXIT_INTERRUPTED
    except OmniError as error:
        logs.complain(f"error ({error.code.value}): {error}")
        return EXIT_FAILED


class _Job:
    """The launchers of one pipeline, one on each node of a placement group."""

    def __init__(self, pipeline: PipelineConfig, arguments: Sequence[str], keys: Mapping[str, str]) -> None:
        self._pipeline, self._arguments, self._keys = pipeline, arguments, keys
        self._nodes: list[Any] = []  # handles of the actors; Ray's types know none of their methods
        self._names: list[str] = []
        self._running: dict[ObjectRef[LauncherOutput], int] = {}
        self._code = EXIT_OK
        self._signals = 0
        self._kill_at: float | None = None

    def run(self) -> int:
        """Start everything, print what it prints, end everything; returns the exit code."""
        import ray

        for number in SIGNALS:  # after ray.init, which has handlers of its own
            signal.signal(number, self._on_signal)
        bundles = bundles_of(self._pipeline, ray.cluster_resources().get("GPU", 0) > 0)
        patience = self._pipeline.coordinator.startup_timeout
        group = ray_cluster.reserve(bundles, "STRICT_SPREAD", patience, f"The pipeline {self._pipeline.name}")
        try:
            self._start(group, bundles)
            while self._running:
                self._look()
        finally:
            ray.util.remove_placement_group(group)  # kills what is left in it
        return self._code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if not self._running:  # nothing to end in order: interrupt what we wait for
            raise KeyboardInterrupt

    def _start(self, group: PlacementGroup, bundles: Sequence[ray_cluster.Bundle]) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for rank, bundle in enumerate(bundles):
            options: dict[str, Any] = {
                "num_cpus": bundle["CPU"],
                "num_gpus": bundle.get("GPU", 0),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
                "max_concurrency": 3,  # follow, stop, and one to spare
            }
            self._nodes.append(ray.remote(RayNode).options(**options).remote())
        addresses = self._answers([node.address.remote() for node in self._nodes])
        self._names = [f"{rank} {host}" for rank, (host, _) in enumerate(addresses)]
        master, free = addresses[0]
        variables = {name: value for name, value in os.environ.items() if name.startswith("OMNI_ACTORS_")}
        variables[ray_cluster.ADDRESS] = ray.get_runtime_context().gcs_address  # a host may be a node of several
        starts = []
        for rank, (node, (host, _)) in enumerate(zip(self._nodes, addresses, strict=True)):
            arguments = [*self._arguments, "--nnodes", str(len(bundles)), "--node-rank", str(rank)]
            arguments += ["--master-addr", master, "--master-port", os.environ.get(PORT) or str(free)]
            arguments += ["--node-addr", host, *(["--headless"] if rank else [])]
            # Arguments of a method go from process to process; those of a constructor would be stored by the cluster.
            starts.append(node.start.remote(arguments, variables, self._keys))
        self._answers(starts)
        self._running = {node.follow.remote(): rank for rank, node in enumerate(self._nodes)}

    def _answers(self, references: Sequence[ObjectRef[Any]]) -> list[Any]:
        import ray

        try:
            return list(ray.get(list(references), timeout=START_SECONDS))
        except ray.exceptions.RayError as error:
            raise StartupError(
                f"Ray could not start a launcher on every node: {type(error).__name__}: {error}",
                hint="Is omni_actors, with this version of Python and Ray, in the same place on all nodes?",
            ) from error

    def _look(self) -> None:
        """Take one report, or note a signal, and draw the conclusions."""
        import ray

        ready, _ = ray.wait(list(self._running), num_returns=1, timeout=LOOK_SECONDS)
        for reference in ready:
            rank = self._running.pop(reference)
            try:
                report: LauncherOutput = ray.get(reference)
            except ray.exceptions.RayError as error:
                self._ended(rank, EXIT_FAILED, f"is lost ({type(error).__name__}: its Ray node or its actor has died)")
                continue
            for line in report.lines:
                print(f"[{self._names[rank]}] {line}", flush=True)
            if report.code is None:
                self._running[self._nodes[rank].follow.remote()] = rank
            else:
                self._ended(rank, report.code, f"ended with {describe_end(report.code)}")
        if self._signals and self._kill_at is None:
            logs.say("stopping")
            self._stop()
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            for rank in self._running.values():
                logs.say(f"node {self._names[rank]} did not end; killing its actor")
                self._code = self._code or EXIT_FAILED
            self._running.clear()

    def _ended(self, rank: int, code: int, how: str) -> None:
        if code and not self._code:  # others may have ended in order before that was known
            logs.say(f"node {self._names[rank]} {how}; ending all")
        self._code = self._code or code
        if self._kill_at is None:
            self._stop()

    def _stop(self) -> None:
        self._kill_at = time.monotonic() + self._pipeline.coordinator.stop_time + KILLED_SECONDS
        for rank in self._running.values():
            self._nodes[rank].stop.remote()


def bundles_of(pipeline: PipelineConfig, with_gpus: bool) -> list[dict[str, float]]:
    """What each node of the pipeline needs from its Ray node: a CPU and, if the cluster has any, its stages' GPUs.

    A launcher sees the GPUs of its bundle alone, and `devices` are counted among them: a node whose stages are on the
    GPUs 0 and 2 needs three. Stages with `executor: ray` reserve theirs themselves.
    """
    devices = MOST_GPUS if with_gpus or any(stage.devices for stage in pipeline.stages) else 0
    bundles: list[dict[str, float]] = []
    for rank in range(pipeline.cluster.nnodes):
        taken = {
            device
            for name, index in placement.replicas_of(pipeline, rank)
            for device in replica_devices(pipeline.stage(name), index, devices)
        }
        bundles.append({"CPU": 1.0, **({"GPU": max(taken) + 1.0} if taken else {})})
    return bundles


def key_files(folder: str | None) -> dict[str, str]:
    """The files that every node needs of a pipeline's key folder, by name; new keys for this job if there is none."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="omni-keys-") as made:
            make_cluster(Path(made))
            return key_files(made)
    keys = load_keys(folder)
    if keys is None or not keys.is_member:
        raise ConfigError(f"{folder} is a client's folder of keys.", hint="Give the pipeline's own folder with --keys.")
    # Not the folders of clients, which hold secrets that no node needs.
    paths = [keys.folder / f"{CLUSTER}{PUBLIC}", keys.folder / f"{CLUSTER}{SECRET}"]
    paths += [path for place in (ALLOWED, OPERATORS) for path in sorted((keys.folder / place).glob(f"*{PUBLIC}"))]
    return {str(path.relative_to(keys.folder)): path.read_text() for path in paths}


def _load(options: argparse.Namespace) -> PipelineConfig:
    """The checked pipeline. GPUs are counted by Ray, and addresses are found once the nodes are known."""
    for name in OWN_FLAGS:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is set by this job itself.", hint="Leave it out.")
    own = {"cluster.node_rank": "0", "cluster.master_addr": json.dumps("127.0.0.1")}
    return config.load(options.config, launch.overrides(options) | own, MOST_GPUS).pipeline


def _without_keys(arguments: Sequence[str]) -> list[str]:
    """The launcher's arguments without `--keys DIR`: the nodes get the files, in a folder of their own."""
    parser = flags.CommandParser(add_help=False)
    parser.add_argument("--keys")
    return parser.parse_known_args(arguments)[1]


def _import_path() -> dict[str, str]:
    """Where the nodes find this package, if it is not installed there."""
    return {"PYTHONPATH": path} if (path := os.environ.get("PYTHONPATH")) else {}


if __name__ == "__main__":
    sys.exit(main())
