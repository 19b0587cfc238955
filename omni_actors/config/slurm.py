"""Reads the hosts of a SLURM job from its environment, for `srun` with one task per node."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Mapping

from omni_actors.errors import ConfigError

SCONTROL_SECONDS = 10.0


def config_overrides(
    environ: Mapping[str, str] | None = None, known: Collection[str] = ()
) -> dict[str, tuple[str, str]]:
    """Return the configuration values that SLURM sets: key -> (value, variable). Empty unless a job has several nodes.

    Args:
        known: keys already set by a source of higher precedence.

    Raises:
        ConfigError: the first host is not configured and cannot be found from SLURM.
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
    """Expand SLURM's notation, which only SLURM knows: the first host of `node[3-4,9]` is `node3`."""
    try:
        command = ["scontrol", "show", "hostnames", hosts]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SCONTROL_SECONDS)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ConfigError(
            f"SLURM_JOB_NODELIST is {hosts!r}, but scontrol cannot expand it: {error}.",
            hint="Unset it, and give --master-addr.",
        ) from error
