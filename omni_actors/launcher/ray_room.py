"""Looks before a launch whether Ray has room for the stages of this host with `executor: ray`."""

from __future__ import annotations

import json
import subprocess
import sys

from omni_actors.config import Executor, PipelineConfig, placement
from omni_actors.config.devices import gpus_of_replica
from omni_actors.errors import ERROR_CLASSES, ErrorCode, OmniError, StartupError
from omni_actors.host import ray_cluster

CHECK = "omni_actors.engine.ray_check"
CHECK_SECONDS = 120.0  # imports, a connection and a reservation, each with a shorter deadline of its own
TAIL_LINES = 5


def check_room(pipeline: PipelineConfig) -> None:
    """Reserve what these stages need and give it back; nothing if there are none.

    Raises:
        ConfigError: Ray is missing or of another version than vLLM takes, vLLM has no Ray executor for this platform,
            there is no cluster to reach, or it is too small.
        StartupError: the cluster is not free enough, or does not answer.
    """
    here = placement.replicas_of(pipeline, pipeline.cluster.node_rank)
    stages = [stage for name, _ in here if (stage := pipeline.stage(name)).executor is Executor.RAY]
    if not stages:
        return
    ray_cluster.check_installed()
    names = ", ".join(dict.fromkeys(stage.name for stage in stages))
    command = [sys.executable, "-m", CHECK, str(sum(map(gpus_of_replica, stages))), names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise StartupError(
            f"Ray did not say within {CHECK_SECONDS:g} s whether it has room for {names}.",
            hint="Look at the cluster with `ray status`.",
        ) from error
    if done.returncode:
        raise failure_of(done.stdout, done.stderr)


def failure_of(stdout: str, stderr: str) -> OmniError:
    """The error that the check has printed; without one, what it has complained about."""
    said = next((line for line in reversed(stdout.splitlines()) if line.startswith("[")), None)
    if said is None:
        tail = "\n".join(stderr.splitlines()[-TAIL_LINES:])
        return StartupError(f"Looking for room on the Ray cluster failed:\n{tail}")
    code, message, hint = json.loads(said)
    return ERROR_CLASSES[ErrorCode(code)](message, hint=hint)
