"""Which segments of shared memory belong to which replica, and their removal when it is dead.

A segment belongs to the replicas whose processes (with their descendants, such as vLLM's workers) hold it when it is
first seen, unless any other process of this host holds it, too. It is removed when the last of these replicas is dead.
Looking is cheap while no new names appear in /dev/shm; only for new ones are the processes searched.

Python's resource tracker alone, which the fork server shares with its processes, removes what a killed one left only
when the launch ends (tried on 2026-11-25 with `SharedMemory`; it does so after a SIGKILL of the launcher, too).

What a process makes and is killed for within `LOOK_SECONDS` may be missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from omni_actors.host import segments
from omni_actors.host.segments import Segment
from omni_actors.logs import get_logger
from omni_actors.protocol.header import ReplicaId

logger = get_logger(__name__)

LOOK_SECONDS = 0.25
GRACE_SECONDS = 1.0  # after a death, for helpers of the dead process that remove segments themselves


class SegmentLedger:
    """Not thread-safe.

    Args:
        file: where the list of the replicas' segments is kept, for others to remove them.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen = segments.existing()
        self._owners: dict[Segment, set[ReplicaId]] = {}

    def look(self, processes: Mapping[ReplicaId, int]) -> None:
        """Find which of these replicas (replica -> pid) own the segments that are new since the last look."""
        present = segments.existing()
        new = {segment.name: segment for segment in present - self._seen}
        self._seen = present
        before = len(self._owners)
        self._owners = {segment: owners for segment, owners in self._owners.items() if segment in present}
        found = _owners(processes, new) if new else {}
        self._owners |= found
        if found or len(self._owners) != before:
            segments.write_list(self._file, self._owners)

    def sweep(self, dead: Iterable[ReplicaId]) -> None:
        """Remove the segments that belong to these replicas and to no living one."""
        for replica in dead:
            for owners in self._owners.values():
                owners.discard(replica)
        left = [segment for segment, owners in self._owners.items() if not owners]
        if left:
            logger.debug("removing shared memory of dead replicas: %s", ", ".join(segment.name for segment in left))
            segments.remove(left)
            self._owners = {segment: owners for segment, owners in self._owners.items() if owners}
            segments.write_list(self._file, self._owners)

    def close(self) -> None:
        """Remove everything that is left of all replicas."""
        segments.remove(self._owners)
        self._owners.clear()
        self._file.unlink(missing_ok=True)


def _owners(processes: Mapping[ReplicaId, int], new: Mapping[str, Segment]) -> dict[Segment, set[ReplicaId]]:
    """Find which of `new`, by name, are held by these replicas and by no one else."""
    parents = {process.pid: process.info["ppid"] for process in psutil.process_iter(["ppid"])}
    replicas = {pid: replica for replica, pid in processes.items()}

    def replica_of(pid: int | None) -> ReplicaId | None:
        while pid is not None:
            if pid in replicas:
                return replicas[pid]
            pid = parents.get(pid)
        return None

    holders: dict[str, set[ReplicaId | None]] = {}
    for pid in parents:
        for name in segments.held_by(pid) & new.keys():
            holders.setdefault(name, set()).add(replica_of(pid))
    return {
        new[name]: {replica for replica in replicas_of_name if replica is not None}
        for name, replicas_of_name in holders.items()
        if None not in replicas_of_name
    }
