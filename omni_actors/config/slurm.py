"""What SLURM says about the hosts of a job, for `srun` with one task per node."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Mapping

from omni_actors.errors import ConfigError

SCONTROL_SECONDS = 10.0


def config_overrides(
    environ: Mapping[str, str] | None = None, known: Collection[str] = ()
) -> dict[str, tuple[str, str]]:
    """Configuration values set by SLURM: key -> (value, variable). Empty outside of jobs with several nodes.

    Args:
        known: keys that somebody with more say has set.

    Raises:
        ConfigError: SLURM does not say which host is the first one, and nobody else does.
    """
    environ = os.environ if environ is None else environ
    nodes = environ.get("SLURM_NNODES", "")
    if not nodes.isdecimal() or int(nodes) < 2:
        return {}
    overrides = {"cluster.nnodes": (nodes, "SLURM_NNODES")}
    if "SLURM_NODEID" in environ:
        overrides["cluster.node_rank"] = environ["SLURM_NODEID"], "SLURM_NODEID"
    hosts = environ.get("SLURM_JOB_NODELIST")
    if hosts and "cluster.master_addr" not in known:
        overrides["cluster.master_addr"] = _first_host(hosts), "SLURM_JOB_NODELIST"
    return {key: value for key, value in overrides.items() if key not in known}


def _first_host(hosts: str) -> str:
    """`node[3-4,9]` is `node3` first; only SLURM knows its own notation."""
    try:
        command = ["scontrol", "show", "hostnames", hosts]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SCONTROL_SECONDS)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ConfigError(
            f"SLURM_JOB_NODELIST is {hosts!r}, but scontrol does not say which hosts these are: {error}.",
            hint="Unset it, and give --master-addr.",
        ) from error
