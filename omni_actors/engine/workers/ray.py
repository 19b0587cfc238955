"""The workers of a stage with `executor: ray`: vLLM's Ray executor, in a placement group that is made here.

Left alone, vLLM makes the group itself, and waits half an hour for room. `python -m omni_actors.engine.workers.ray
DEVICES NAMES` checks for the launcher, which loads neither vLLM nor Ray, that there is room.

A process of its own for the launcher, which loads neither vLLM nor Ray. It reserves as many devices, gives them back,
and prints the error of a failure as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from omni_actors.engine.platform import prepare
from omni_actors.errors import ConfigError, OmniError
from omni_actors.host import ray_cluster
from omni_actors.host.processes import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from vllm.config import ParallelConfig


RESERVE_SECONDS = 60.0  # what the last process of a replica held becomes free a moment after its end
# In the process of a worker before it imports vLLM; the executor sends it the rest of our environment afterwards.
EARLY_VARIABLES = ("PYTHONPATH", "VLLM_PLUGINS", "OMNI_ACTORS_ALLOW_IMPORTS")
SECRETS = ("OMNI_ACTORS_API_KEY",)  # which no worker needs
SETUP = "omni_actors.engine.platform.prepare"


def place_workers(parallel: ParallelConfig) -> None:
    """Connect to the Ray cluster and reserve a device for each worker; vLLM's executor then starts them there.

    Raises:
        ConfigError: vLLM has no Ray executor for this platform, there is no cluster to reach, or it is too small.
        StartupError: no devices became free in time.
    """
    parallel.placement_group = reserve_devices(parallel.world_size, RESERVE_SECONDS, "A replica with executor: ray")
    for name in SECRETS:
        os.environ.pop(name, None)


def reserve_devices(count: int, seconds: float, what: str) -> PlacementGroup:
    """Connect to the Ray cluster and reserve devices of this platform, each in a bundle, as vLLM expects them.

    Raises:
        ConfigError, StartupError: as `place_workers`.
    """
    key = device_key()
    ray_cluster.connect({name: os.environ[name] for name in EARLY_VARIABLES if name in os.environ}, SETUP)
    return ray_cluster.reserve([{key: 1.0} for _ in range(count)], "PACK", seconds, what)


def device_key() -> str:
    """What Ray calls the devices of this platform. Raises `ConfigError` for one without Ray."""
    key: str = current_platform.ray_device_key
    if not key:
        raise ConfigError(
            f"executor: ray needs GPUs: the platform of the vLLM here, {current_platform.device_name!r}, has no Ray "
            "executor.",
            hint="Leave out `executor`, or install omni_actors[cuda,ray].",
        )
    return key


ROOM_SECONDS = 20.0


def main(count: int, names: str) -> int:
    """Reserve and give back; returns the exit code."""
    try:
        prepare()

        reserve_devices(count, ROOM_SECONDS, f"executor: ray of {names}")  # ends with this process
    except OmniError as error:
        print(json.dumps([error.code, error.message, error.hint]))
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
