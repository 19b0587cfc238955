"""Named shared memory: whose it is, and that only what belongs to a dead replica is removed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from omni_actors.host import segments
from omni_actors.host.run_directory import RunDirectory
from omni_actors.host.segments import Segment
from omni_actors.launcher.replica_processes import SegmentLedger
from omni_actors.protocol.fields import ReplicaId
from tests.support.segments import holder

TALKER, OTHER = ReplicaId("talker", 0, 1), ReplicaId("talker", 1, 1)
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def path() -> Iterator[str]:
    """A path in /dev/shm; removed at the end."""
    path = f"/dev/shm/omni-test-{uuid4()} with a space"
    yield path
    Path(path).unlink(missing_ok=True)


@pytest.fixture
def hold() -> Iterator[Start]:
    """Starts processes that map files."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*paths: str) -> subprocess.Popen[bytes]:
        started.append(holder(*paths))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_what_two_replicas_hold_stays_until_both_are_dead(tmp_path: Path, path: str, hold: Start) -> None:
    ledger = SegmentLedger(tmp_path / "segments")
    ledger.look({TALKER: hold(path).pid, OTHER: hold(path).pid})
    ledger.sweep([TALKER])
    assert os.path.exists(path)
    ledger.sweep([OTHER])
    assert not os.path.exists(path)


def test_a_file_that_took_the_same_name_is_not_removed(path: str) -> None:
    Path(path).touch()
    name = Path(path).name
    segments.remove([Segment(name, os.stat(path).st_ino + 1)])
    assert os.path.exists(path)
    segments.remove([Segment(name, os.stat(path).st_ino), Segment("omni-test-never", 1)])
    assert not os.path.exists(path)


def test_the_next_launcher_removes_what_a_killed_one_has_listed(short_path: Path, path: str, hold: Start) -> None:
    folder = short_path / "run"
    folder.mkdir(mode=0o700)
    ledger = SegmentLedger(folder / "segments")
    ledger.look({TALKER: hold(path).pid})
    run = RunDirectory(str(folder))
    try:
        assert not os.path.exists(path)
    finally:
        run.close()
    assert [entry.name for entry in folder.iterdir()] == ["logs"]
