"""Runs a command and ends it when standard input closes.

Usage: `python -m omni_actors.launcher.exit_with_stdin COMMAND [ARGUMENT ...]`. For commands started over ssh: when
the connection or the caller is gone, ssh closes standard input and sends no signal. The command then gets SIGTERM, and
is killed if it does not end in time; a launcher says how long its pipeline may take.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from omni_actors.host.processes import EXIT_USAGE, ChildStopTime, die_with_parent

GRACE_SECONDS = 15.0  # for the end of a command that does not say how long it takes
EXIT_NOT_FOUND = 127  # as in a shell


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code, or 128 plus the number of the signal that ended it."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    if not command:
        print("usage: python -m omni_actors.launcher.exit_with_stdin COMMAND [ARGUMENT ...]", file=sys.stderr)
        return EXIT_USAGE
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # one entry for each reason; a signal may interrupt its `put`
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.put(None))  # unlike SIG_IGN, this is not inherited by the child
    stop_time = ChildStopTime(GRACE_SECONDS)
    options = stop_time.popen_arguments(os.environ)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent, **options)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return EXIT_NOT_FOUND
    threading.Thread(target=_read_to_the_end, args=(ended,), daemon=True).start()
    threading.Thread(target=_end, args=(child, ended, stop_time), daemon=True).start()
    code = child.wait()
    return 128 - code if code < 0 else code


def _read_to_the_end(ended: queue.SimpleQueue[None]) -> None:
    """Wait until standard input closes; what comes in is of no interest."""
    with contextlib.suppress(OSError):  # a terminal that is gone is closed, too
        while os.read(0, 65536):
            pass
    ended.put(None)


def _end(child: subprocess.Popen[bytes], ended: queue.SimpleQueue[None], stop_time: ChildStopTime) -> None:
    """Terminate the child for each reason, and kill it if it takes too long from the first one on."""
    ended.get()
    kill_at = time.monotonic() + stop_time.seconds
    with contextlib.suppress(queue.Empty):
        while True:
            child.terminate()
            ended.get(timeout=max(0.0, kill_at - time.monotonic()))
    child.kill()


if __name__ == "__main__":
    sys.exit(main())
