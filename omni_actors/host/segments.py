"""Shared memory with a name (/dev/shm): who holds it, and its removal when those who made it are dead.

Engines, and the libraries below them, name their segments as they like, and a process that is killed removes none of
them. So the names are neither guessed nor prescribed: a launcher watches which segments appear and looks which of its
replicas holds each (`launcher/replica_processes.py`). A list of those lies in the run directory, for the processes that
clean up after a launcher that was killed itself. A segment counts as the same only with the same inode.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FOLDER = Path("/dev/shm")
DELETED = " (deleted)"


class Segment(NamedTuple):
    """A file in /dev/shm."""

    name: str
    inode: int


def existing() -> set[Segment]:
    """Return all segments of this host."""
    with contextlib.suppress(FileNotFoundError), os.scandir(FOLDER) as entries:
        return {Segment(entry.name, entry.inode()) for entry in entries}
    return set()


def held_by(pid: int) -> set[str]:
    """Return the names of the segments that a process maps or has open; none if it has ended or is not ours."""
    prefix = f"{FOLDER}/"
    paths: list[str] = []
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
        paths += [prefix + line.split(prefix, 1)[1] for line in maps.splitlines() if prefix in line]
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                paths.append(os.readlink(link))
    return {path.removeprefix(prefix) for path in paths if path.startswith(prefix) and not path.endswith(DELETED)}


def remove(segments: Iterable[Segment]) -> None:
    """Remove those that still exist. Processes that map one keep its memory."""
    for segment in segments:
        path = FOLDER / segment.name
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if path.stat().st_ino == segment.inode:
                path.unlink()


def write_list(file: Path, segments: Iterable[Segment]) -> None:
    """Replace a list of segments."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(sorted(segments)))
    new.replace(file)


def remove_listed(file: Path) -> None:
    """Remove the segments of a list, and the list. Does nothing without one."""
    try:
        listed = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):  # a launcher that was killed before it wrote one
        return
    remove(Segment(name, inode) for name, inode in listed)
    file.unlink(missing_ok=True)
