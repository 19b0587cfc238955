"""Waiting for a GPU's memory, which the driver or MPS takes back some time after a process was killed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from omni_actors.stage.start_phases import phase

logger = logging.getLogger(__name__)

GIB = 1 << 30
MEMORY_SECONDS = 10.0
POLL_SECONDS = 0.05


def wait_for_memory(
    measure: Callable[[], tuple[int, int]],
    share: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until a share of a device's memory is free, at most `MEMORY_SECONDS`; whether it is.

    Does not raise if it is not: vLLM then refuses the start, with the figures and what to change.

    Args:
        measure: returns the free and the total bytes of the device; its first call may initialise it.
        share: of the total, from 0 to 1.
    """
    with phase("device"):
        free, total = measure()
    if free >= share * total:
        return True
    text = "waiting for memory of the device: %.1f GiB are free, %.1f GiB needed"
    logger.warning(text, free / GIB, share * total / GIB)
    with phase("waiting for memory"):
        began = clock()
        while clock() < began + MEMORY_SECONDS:
            sleep(POLL_SECONDS)
            free, total = measure()
            if free >= share * total:
                logger.info("the device's memory was free after %.1f s", clock() - began)
                return True
    logger.error("the memory did not become free within %g s: another process holds it", MEMORY_SECONDS)
    return False
