"""A Ray cluster of two nodes on this machine, in a process of its own: `python -m tests.support.ray_nodes`.

Each node has three processors and a GPU, as Ray counts them; nothing here computes on one. The process prints the
cluster's address, and ends the cluster when its standard input closes. Ray's signal handlers would not suit the process
of the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.support.builders import chain
from tests.support.paths import REPOSITORY
from tests.support.processes import processes_of, title_of
from tests.support.waiting import until

ADDRESS = "cluster at "
NODE = {"num_cpus": 3, "num_gpus": 1, "object_store_memory": 80_000_000, "include_log_monitor": False}


class RayNodes:
    """Two nodes.

    Args:
        folder: for all that Ray writes, in `ray`, and all that launchers write on the nodes, in `run`.
        environment: of the nodes, in addition to this process's own.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        self.run, ray = folder / "run", folder / "ray"
        for made in (self.run, ray):
            made.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "TMPDIR": str(self.run),
                "RAY_TMPDIR": str(folder),
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_worker_niceness": "0",
                **environment,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        said = next((line for line in self._process.stdout if line.startswith(ADDRESS)), None)
        assert said, "the cluster did not start; its output above says why"
        self.address = said.removeprefix(ADDRESS).strip()

    def launchers(self) -> dict[int, str]:
        """Processes of the pipelines on the nodes: pid -> command line."""
        return processes_of(self.run)

    def until_nothing_is_left(self) -> None:
        """Wait until neither processes nor files of launchers, such as keys, are left."""

        def files() -> set[Path]:
            return {*self.run.iterdir()}

        until(lambda: not (self.launchers() or files()), 20.0, lambda: f"the end of {self.launchers()} and {files()}")

    def workers(self) -> list[tuple[int, int]]:
        """Node and process of each of vLLM's workers: (pid of the node's raylet, own pid)."""
        started = psutil.Process(self._process.pid).children(recursive=True)
        return [(process.ppid(), process.pid) for process in started if "RayWorkerProc" in title_of(process)]

    def until_no_workers_are_left(self) -> None:
        until(lambda: not self.workers(), 20.0, lambda: f"the end of {self.workers()}")

    def close(self) -> None:
        try:
            self._process.communicate(timeout=60)
        finally:
            self._process.kill()


def spread_chain() -> dict[str, Any]:
    """The echo chain with its last two stages on node 1."""
    data = chain()
    for stage in data["stages"][2:]:
        stage["node"] = 1
    return data


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    print(f"{ADDRESS}{cluster.address}", flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
