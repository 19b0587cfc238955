"""Ends what tests have started when pytest itself is killed: `guard.py PID MARK`, a process next to pytest.

pytest that is interrupted tears its fixtures down; one that gets SIGTERM or SIGKILL does not, and launchers, browsers
and hosts of network namespaces would live on. All of them carry MARK in the environment that they were started with.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

NAME = "OMNI_TEST_SESSION"
GRACE_SECONDS = 10.0  # for launchers to end their stages in order


_begun: list[subprocess.Popen[bytes]] = []


def begin() -> None:
    """Mark the processes that this one will start, so that a guard ends them when this one has ended."""
    mark = os.environ[NAME] = f"{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, "-S", __file__, str(os.getpid()), mark]  # -S: without site no coverage of its own
    _begun.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))


def marked(mark: str) -> list[int]:
    """Living processes that were started with the mark, except this one."""
    wanted = f"{NAME}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it has just ended, or it is not ours
                continue
    return found


def end(mark: str) -> None:
    """Send SIGTERM to all, and SIGKILL to those that are left after the grace time."""
    began = time.monotonic()
    signalled: set[int] = set()
    while (left := marked(mark)) and time.monotonic() < began + 2 * GRACE_SECONDS:
        late = time.monotonic() > began + GRACE_SECONDS
        for pid in left:
            if late or pid not in signalled:
                signal_to(pid, signal.SIGKILL if late else signal.SIGTERM)
        signalled.update(left)
        time.sleep(0.1)


def signal_to(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)  # noqa: TID251 - runs without site packages
    except ProcessLookupError:
        return


def main() -> None:
    watched, mark = int(sys.argv[1]), sys.argv[2]
    try:
        pidfd = os.pidfd_open(watched)
    except ProcessLookupError:  # it has ended already
        end(mark)
        return
    select.select([pidfd], [], [])
    end(mark)


if __name__ == "__main__":
    main()
