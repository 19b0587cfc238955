"""Sets up the fork server's signals and exit. Imported last by the fork server, and by nothing else.

The server must outlive the stages: if a SIGTERM to the whole process group ended it first, the launcher would lose
sight of its children. It ends when the launcher closes its end of the pipe, then at once and without tearing down an
interpreter full of imported libraries: it is imported last so that its exit handler is the first to run.
"""

from __future__ import annotations

import atexit
import os
import signal

_SERVER = os.getpid()


def _exit_at_once() -> None:
    if os.getpid() == _SERVER:  # children inherit the registration
        os._exit(0)


# Blocked, not ignored: a signal sent to a child that has just been forked then waits until the child has its own
# handler and unblocks it. An ignored SIGTERM would be lost, and the launcher would wait for its whole shutdown_timeout;
# a SIGINT with the default handler, which children of a fork server get, would end a new child like a failure.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
atexit.register(_exit_at_once)
