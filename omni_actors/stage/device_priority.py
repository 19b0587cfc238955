"""Whose turn it is on a shared device: stages that can wait leave it to one whose requests wait for their first output.

A device runs the kernels of several processes in turns, so a vocoder that is busy anyway makes every thinker's prefill
two or three times as long, and with it everybody's first token. A stage with `yields_to: [thinker]` leaves out its
steps while a thinker on the same device has such requests: for at most half of the time, so that it never starves.
Requests whose own input is not there yet do not count: to wait would only keep it from coming.

The sign is eight bytes of memory per replica, mapped from a file in the run directory: until when (on the clock that
all processes of a host share) the replica wants the device. It expires by itself if its owner dies or hangs.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from omni_actors.logs import get_logger

logger = get_logger(__name__)

SIGN = struct.Struct("<d")
VALID_SECONDS = 0.25  # a sign that is not renewed, once per step of its owner, means nothing any more
PATIENCE_SECONDS = 0.25  # in a row; after that the stage works on for as long
POLL_SECONDS = 0.001
SEARCH_SECONDS = 1.0  # between two looks for signs that were not there


def sign_path(folder: Path, stage: str, replica: int) -> Path:
    return folder / f"turn-{stage}-{replica}"


class DemandFlag:
    """A replica's own sign. Made before others look for it; harmless where nobody does."""

    def __init__(self, folder: Path, stage: str, replica: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._memory = _allocate(sign_path(folder, stage, replica))
        self._shown = False

    def show(self, wanted: bool) -> None:
        """Say whether requests wait for their first output."""
        if self._memory is not None and (wanted or self._shown):
            SIGN.pack_into(self._memory, 0, self._clock() + VALID_SECONDS if wanted else 0.0)
        self._shown = wanted


def _allocate(path: Path) -> mmap.mmap | None:
    """The sign's memory; `None` if the disk is full: nobody gives way then.

    Allocated for certain, as a write into a hole of a file on a full disk would end the process.
    """
    try:
        with path.open("a+b") as file:
            os.posix_fallocate(file.fileno(), 0, SIGN.size)
            return mmap.mmap(file.fileno(), SIGN.size)
    except OSError as error:
        logger.warning("other stages cannot give way to this one: %s: %s", path, error)
        return None


class DevicePriority:
    """Decides before each step of a replica whether to leave it out.

    Args:
        others: (stage, replica) of those that go first.
    """

    def __init__(
        self, folder: Path, others: Iterable[tuple[str, int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._missing = [sign_path(folder, stage, replica) for stage, replica in others]
        self._signs: list[mmap.mmap] = []
        self._clock = clock
        self._search_at = 0.0
        self._waiting_since: float | None = None
        self._works_until = 0.0

    def now(self) -> bool:
        """Whether to wait, and ask again after `POLL_SECONDS`."""
        if not self._missing and not self._signs:
            return False
        clock = self._clock()
        if self._missing and clock >= self._search_at:
            self._search_at = clock + SEARCH_SECONDS
            self._find()
        if clock < self._works_until or not any(SIGN.unpack_from(sign)[0] > clock for sign in self._signs):
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = clock
        if clock - self._waiting_since < PATIENCE_SECONDS:
            return True
        self._works_until = clock + PATIENCE_SECONDS
        self._waiting_since = None
        return False

    def _find(self) -> None:
        for path in list(self._missing):
            if path.exists() and path.stat().st_size == SIGN.size:
                with path.open("rb") as file:
                    self._signs.append(mmap.mmap(file.fileno(), SIGN.size, access=mmap.ACCESS_READ))
                self._missing.remove(path)
