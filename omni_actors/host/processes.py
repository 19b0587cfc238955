"""Processes of this host and their clocks: ends with the parent, open files, priorities.

A process keeps deadlines in Unix time as its own `STEADY` clock has it. On the wire they are those of the wall clock,
which all processes share: the codec converts them, so that a process that was started after a jump agrees with others.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import math
import os
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from multiprocessing import resource_tracker
from typing import Any

import psutil

from omni_actors.envs import STOP_TIME
from omni_actors.logs import get_logger

logger = get_logger(__name__)

STILL_SECONDS, STOPPED_LOOKS, WAITING_LOOKS = 3.0, 2, 10
JUMP_SECONDS = 1.0  # smaller differences between wall clock and monotonic clock do not count as jumps


def _wall() -> float:
    return time.time()


class AnchoredClock:
    """Unix time that starts at the wall clock and advances with the monotonic clock."""

    def __init__(self, wall: Callable[[], float] = _wall, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        # The largest of three: who is interrupted between the two readings gets one that is too small.
        self._anchor = max(wall() - monotonic() for _ in range(3))

    def __call__(self) -> float:
        """Seconds since the epoch, never less than at the call before."""
        return self._anchor + self._monotonic()

    def of(self, monotonic: float) -> float:
        """Convert a reading of the monotonic clock."""
        return self._anchor + monotonic

    def jumped(self) -> float:
        """Seconds by which the wall clock was set forward since this clock was made; 0 if it was not set."""
        difference = self._wall() - self()
        return difference if abs(difference) >= JUMP_SECONDS else 0.0


STEADY = AnchoredClock()  # of this process


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)

FILES = 65_536  # open files to ask for, where each connection is one

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
EXIT_INTERRUPTED = 128 + signal.SIGINT


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send this process a signal when its parent dies.

    The kernel watches the thread that started this process, so that thread must live as long as its process. A parent
    that is already dead sends nothing: callers that cannot rely on another sign compare `os.getppid()` afterwards.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent dies, so that they are found among the children."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def give_back_memory() -> None:
    """Give to the system what the allocator holds in reserve. Takes about a millisecond for 3 MB of it."""
    ctypes.CDLL(None).malloc_trim(0)


class ChildStopTime:
    """How long a child may take to end in order before its parent kills it, as the child says (`announce_stop_time`).

    Args:
        seconds: as long as it has said nothing.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._reader, self._writer = open(reader, "rb", buffering=0), open(writer, "wb", buffering=0)  # noqa: SIM115

    def popen_arguments(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """What `subprocess.Popen` needs, so that a child with this environment can say it."""
        descriptor = self._writer.fileno()
        return {"env": {**environment, STOP_TIME: str(descriptor)}, "pass_fds": (descriptor,)}

    @property
    def seconds(self) -> float:
        """What the child has said by now."""
        if said := self._reader.read(64):
            self._seconds = float(said)
        return self._seconds

    def close(self) -> None:
        """Let go of the pipe. Idempotent."""
        self._reader.close()
        self._writer.close()


def announce_stop_time(seconds: float) -> None:
    """Tell the parent, if it wants to know, how long this process may take to end in order. Once."""
    if writer := os.environ.pop(STOP_TIME, None):
        os.write(int(writer), str(seconds).encode())
        os.close(int(writer))


def start_resource_tracker() -> None:
    """Start the process that removes what multiprocessing's users leave, without its complaint about them.

    A replica that is killed leaves its semaphores. The tracker removes them in the end, and would say on our terminal
    that they were leaked.
    """
    before = os.environ.get("PYTHONWARNINGS")
    rules = [before] if before else []
    os.environ["PYTHONWARNINGS"] = ",".join([*rules, "ignore:resource_tracker:UserWarning"])
    try:
        resource_tracker.ensure_running()
    finally:
        del os.environ["PYTHONWARNINGS"]
        if before is not None:
            os.environ["PYTHONWARNINGS"] = before


def process_start() -> float:
    """When this process started, on the monotonic clock."""
    return time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())


def raise_file_limit(reserved: int) -> int:
    """Raise the soft limit of open files towards the hard one; return how many connections then fit.

    Args:
        reserved: files that the process needs for everything else.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, FILES) if hard == resource.RLIM_INFINITY or hard > FILES else hard
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(1, wanted - reserved)


async def at_most(seconds: float, awaitable: Awaitable[object]) -> None:
    """Wait, but not longer than this."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await awaitable


async def end_tasks(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel the tasks that there are, and wait until they have ended, however they do."""
    there = [task for task in tasks if task is not None]
    for task in there:
        task.cancel()
    await asyncio.gather(*there, return_exceptions=True)


async def until_done(done: asyncio.Future[Any], workers: Callable[[], Iterable[psutil.Process]]) -> None:
    """Wait for what these processes do; kill them when their main threads have stood still for some seconds.

    Two looks in a row must say so: this process may itself have been stopped together with them. A process
    that was not stopped may be waiting for a slow disk or for a child, so it gets half a minute.
    """
    now: dict[psutil.Process, object] = {}
    still = 0
    while not (await asyncio.wait({done}, timeout=STILL_SECONDS))[0]:
        with contextlib.suppress(psutil.NoSuchProcess):
            before, now = now, {worker: worker.num_ctx_switches() for worker in workers()}
            still = still + 1 if now == before else 0
            for worker in now:
                if still == (STOPPED_LOOKS if worker.status() == psutil.STATUS_STOPPED else WAITING_LOOKS):
                    logger.error("process %d stands still; killing it", worker.pid)
                    worker.kill()


def describe_exit(code: int | None) -> str:
    """Describe an exit code as `subprocess` and `multiprocessing` report it: 'exit code 1', 'killed by signal 9'."""
    if code is None:
        return "ended without an exit code"
    return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"


class Backoff:
    """Decides when a process that died starts again. Pure: times are seconds of any one clock that the caller reads.

    The first restart is immediate, the second waits `first` seconds, and every further one twice as long as the one
    before it, up to `last`. There may be `limit` restarts, or any number for `None`, within `window` seconds; older
    ones no longer count.
    """

    def __init__(self, first: float, last: float, limit: int | None = None, window: float = math.inf) -> None:
        self._first, self._last = first, last
        self._limit, self._window = limit, window
        self._restarts: collections.deque[float] = collections.deque()

    def next(self, now: float) -> float | None:
        """Count one more restart and return the seconds to wait before it; `None` if the limit is reached."""
        while self._restarts and self._restarts[0] + self._window <= now:
            self._restarts.popleft()
        earlier = len(self._restarts)
        if self._limit is not None and earlier >= self._limit:
            return None
        self._restarts.append(now)
        doublings = min(earlier - 1, 64)  # a much larger power would overflow a float
        return min(self._last, self._first * 2**doublings) if earlier else 0.0

    def reset(self) -> None:
        """Forget all restarts, as after a long healthy life."""
        self._restarts.clear()

    @property
    def restarts(self) -> int:
        """Restarts counted at the latest call of `next`."""
        return len(self._restarts)
