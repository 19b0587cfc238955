"""Checks that a Ray cluster has room for stages: `python -m omni_actors.engine.ray_check DEVICES NAMES`.

A process of its own for the launcher, which loads neither vLLM nor Ray. It reserves as many devices, gives them back,
and prints the error of a failure as one line of JSON.
"""

from __future__ import annotations

import json
import sys

from omni_actors.engine.platform import prepare
from omni_actors.errors import OmniError
from omni_actors.host.processes import EXIT_FAILED, EXIT_OK

ROOM_SECONDS = 20.0


def main(count: int, names: str) -> int:
    """Reserve and give back; returns the exit code."""
    try:
        prepare()
        from omni_actors.engine.ray_workers import reserve_devices

        reserve_devices(count, ROOM_SECONDS, f"executor: ray of {names}")  # ends with this process
    except OmniError as error:
        print(json.dumps([error.code, error.message, error.hint]))
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
