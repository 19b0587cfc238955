"""Finds processes of a test, and what they have left behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.support.waiting import PATIENCE


def processes_of(folder: Path) -> dict[int, str]:
    """Living processes that hold a file in `folder` open (all of a launcher's log there): pid -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            links = [os.readlink(link) for link in (entry / "fd").iterdir()]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it has just ended
            continue
        if any(link.startswith(f"{folder}/") for link in links):
            found[int(entry.name)] = command
    return found


def shared_memory_of(pids: Mapping[int, str]) -> set[str]:
    """Files in /dev/shm that these processes map or hold open."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {line.split()[-1] for line in maps.splitlines() if "/dev/shm/" in line}
            found |= {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
    return {name for name in found if name.startswith("/dev/shm/") and "(deleted)" not in name}


def processes_titled(title: str, parent: int) -> list[int]:
    """Children of `parent` whose process title begins with `title`."""
    return [child.pid for child in psutil.Process(parent).children() if title_of(child).startswith(title)]


def title_of(process: psutil.Process) -> str:
    """The title of a process, "" for one that has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def coordinator_of(folder: Path) -> int:
    """The coordinator of the launcher whose log is in `folder`; 0 if there is none now."""
    return next((pid for pid, title in processes_of(folder).items() if title == "omni:coordinator"), 0)


def end_all(folder: Path) -> None:
    """Only processes of this folder: a failed test must not leave any to the next."""
    for pid in processes_of(folder):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            psutil.Process(pid).kill()


def assert_nothing_left(folder: Path, seconds: float = 5.0, shared: set[str] | None = None) -> None:
    """No process, socket or shared memory of the launchers in `folder` is left within `seconds`."""

    def sockets() -> list[str]:
        return [str(entry) for entry in folder.rglob("*") if entry.is_socket()]

    deadline = time.monotonic() + seconds * PATIENCE
    while (processes := processes_of(folder)) or sockets():
        assert time.monotonic() < deadline, f"left behind: {processes} {sockets()}"
        time.sleep(0.05)
    assert not [name for name in shared or () if os.path.exists(name)]
