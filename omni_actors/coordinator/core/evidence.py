"""What the end of a replica says about the requests that it was computing."""

from __future__ import annotations

import enum
import signal

# A stage that is ended by SIGTERM while it loads exits with 128 + its number.
_FROM_OUTSIDE = {0, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT, -signal.SIGHUP}


class Evidence(enum.IntEnum):
    """How much one loss counts. Two kills count as much as one crash."""

    NONE = 0  # its node was lost, it registered again, or its restart was asked for
    KILLED = 1  # by an operator, or by the kernel because memory ran out, which a request may have caused
    CRASHED = 2  # it failed by itself, or hung


def evidence_of(exit_code: int | None) -> Evidence:
    """Judge the end of a process. The code is that of `multiprocessing`; `None` if it is not known."""
    return Evidence.KILLED if exit_code is None or exit_code in _FROM_OUTSIDE else Evidence.CRASHED
