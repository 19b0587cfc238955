"""Runs a command and ends it when standard input closes.

Usage: `python -m omni_actors.launcher.exit_with_stdin COMMAND [ARGUMENT ...]`. For commands started over ssh: when
the connection or the caller is gone, ssh closes standard input and sends no signal. The command then gets SIGTERM, and
is killed if it does not end in time; a launcher says how long its pipeline may take.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from omni_actors.host.processes import EXIT_USAGE, ChildStopTime, die_with_parent

GRACE_SECONDS = 15.0  # for the end of a command that does not say how long it takes
POLL_MS = 500
EXIT_NOT_FOUND = 127  # as in a shell


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code, or 128 plus the number of the signal that ended it."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    if not command:
        print("usage: python -m omni_actors.launcher.exit_with_stdin COMMAND [ARGUMENT ...]", file=sys.stderr)
        return EXIT_USAGE
    signalled, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the wakeup counts; unlike SIG_IGN, this is not inherited by the child
    stop_time = ChildStopTime(GRACE_SECONDS)
    options = stop_time.popen_arguments(os.environ)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent, **options)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return EXIT_NOT_FOUND
    code = _wait(child, signalled, stop_time)
    return 128 - code if code < 0 else code


def _wait(child: subprocess.Popen[bytes], signalled: int, stop_time: ChildStopTime) -> int:
    """Wait for the child's end; terminate it when the input closes or a signal arrives."""
    poller = select.poll()
    ended = os.pidfd_open(child.pid)
    for descriptor in (0, signalled, ended):
        poller.register(descriptor, select.POLLIN)
    kill_at = float("inf")
    while child.poll() is None:
        ready = {descriptor for descriptor, _ in poller.poll(POLL_MS)}
        terminate = signalled in ready and bool(os.read(signalled, 64))
        if 0 in ready and not os.read(0, 65536):
            poller.unregister(0)
            terminate = True
        if terminate:
            child.terminate()
            kill_at = min(kill_at, time.monotonic() + stop_time.seconds)
        if time.monotonic() > kill_at:
            child.kill()
    os.close(ended)
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
