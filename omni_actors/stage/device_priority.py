"""Lets a stage skip steps while a higher-priority stage on the same GPU awaits its first output.

A device runs the kernels of several processes by turns, so a vocoder that is busy anyway makes every thinker's prefill
two or three times as long, and with it the time to the first token. A stage with `yields_to: [thinker]` skips steps
while a thinker on the same device computes first outputs, for at most half of the time, so that it never starves.
A request that still waits for input does not count, because yielding could delay that very input. A vocoder wants the
device while a listener falls silent (`stage/deadlines.py`).

A demand flag is eight bytes of memory per replica, mapped from a file in the run directory: until when the replica
wants the device, on the clock that all processes of a host share. It expires when its owner dies or hangs. The file's
name says which replica it is and where it computes, so that replicas which come later, or to another device, are found.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from omni_actors.host.run_directory import DEMAND_PREFIX
from omni_actors.logs import get_logger

logger = get_logger(__name__)

FLAG = struct.Struct("<d")
VALID_SECONDS = 0.25  # a flag that its owner does not renew, once per step, means nothing after that
PATIENCE_SECONDS = 0.25  # of yielding in a row; after that the stage works for as long
POLL_SECONDS = 0.001
SEARCH_SECONDS = 1.0  # between two searches for flags that were not there
CPU = "cpu"  # where a replica without a GPU computes


def _places(devices: Iterable[int]) -> set[str]:
    """Where a replica computes: its GPUs, or the host's CPU."""
    return {str(device) for device in devices} or {CPU}


def _flag_path(folder: Path, stage: str, replica: int, devices: Iterable[int]) -> Path:
    """Path of a replica's demand flag in the run directory, which `_search` reads; names of stages have no hyphen."""
    return folder / f"{DEMAND_PREFIX}{stage}-{replica}-{'+'.join(sorted(_places(devices)))}"


class DemandFlag:
    """A replica's own flag. Other replicas may read it at any time; if none does, it has no effect.

    Args:
        devices: the replica's GPUs, as the configuration counts them; none if it computes on the CPU.
    """

    def __init__(
        self,
        folder: Path,
        stage: str,
        replica: int,
        devices: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._memory = _allocate(_flag_path(folder, stage, replica, devices))
        self._raised = False

    def set(self, wanted: bool) -> None:
        """Tell other replicas whether this one's requests await their first output."""
        if self._memory is not None and (wanted or self._raised):
            FLAG.pack_into(self._memory, 0, self._clock() + VALID_SECONDS if wanted else 0.0)
        self._raised = wanted


def _allocate(path: Path) -> mmap.mmap | None:
    """Map the flag's memory; `None` if the disk is full: then no stage yields to this one.

    The file is allocated first, because a write into a hole of a file on a full disk would end the process.
    """
    try:
        with path.open("a+b") as file:
            os.posix_fallocate(file.fileno(), 0, FLAG.size)
            return mmap.mmap(file.fileno(), FLAG.size)
    except OSError as error:
        logger.warning("other stages cannot yield to this one: %s: %s", path, error)
        return None


class DevicePriority:
    """Decides before each step of a replica whether to skip it.

    Args:
        stages: those to whose replicas on the same device this one yields.
        devices: its own GPUs, as for `DemandFlag`.
    """

    def __init__(
        self,
        folder: Path,
        stages: Iterable[str],
        devices: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._stages = frozenset(stages)
        self._places = _places(devices)
        self._flags: dict[str, mmap.mmap] = {}  # by the file's name
        self._clock = clock
        self._search_at = 0.0
        self._yielding_since: float | None = None
        self._works_until = 0.0

    def yields(self) -> bool:
        """Whether to skip a step now, and ask again after `POLL_SECONDS`."""
        if not self._stages:
            return False
        now = self._clock()
        if now >= self._search_at:
            self._search_at = now + SEARCH_SECONDS
            with contextlib.suppress(OSError):  # the run directory is being removed, for instance
                self._search()
        if now < self._works_until or not any(FLAG.unpack_from(flag)[0] > now for flag in self._flags.values()):
            self._yielding_since = None
            return False
        if self._yielding_since is None:
            self._yielding_since = now
        if now - self._yielding_since < PATIENCE_SECONDS:
            return True
        self._works_until = now + PATIENCE_SECONDS
        self._yielding_since = None
        return False

    def _search(self) -> None:
        for name in os.listdir(self._folder):
            if name in self._flags or not name.startswith(DEMAND_PREFIX):
                continue
            stage, _, places = name.removeprefix(DEMAND_PREFIX).split("-")
            path = self._folder / name
            if stage in self._stages and self._places.intersection(places.split("+")) and _is_allocated(path):
                with path.open("rb") as file:
                    self._flags[name] = mmap.mmap(file.fileno(), FLAG.size, access=mmap.ACCESS_READ)


def _is_allocated(path: Path) -> bool:
    """Whether the flag's owner has made all of the file; a mapping of less would end this process."""
    return path.stat().st_size == FLAG.size
