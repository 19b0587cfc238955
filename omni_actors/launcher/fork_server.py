"""Imported last by the fork server, and by nothing else: how the server itself lives and ends.

The server must outlast the stages: a SIGTERM to the whole process group would otherwise take it away first, and the
launcher would lose sight of its children. It ends when the launcher's end of its pipe closes; then at once, without
tearing down an interpreter full of imported libraries: hence last, so that its exit handler is the first to run.
"""

from __future__ import annotations

import atexit
import os
import signal

_SERVER = os.getpid()


def _leave_at_once() -> None:
    if os.getpid() == _SERVER:  # children inherit the registration
        os._exit(0)


# Blocked, not ignored: what is sent to a child that has just been forked waits until the child has a handler of its own
# and unblocks it. An ignored one would be lost, and the launcher would wait its whole shutdown_timeout in vain.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
atexit.register(_leave_at_once)
