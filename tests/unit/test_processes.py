"""How processes begin, end with their parent, and fail to start; what is removed of their shared memory."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from omni_actors.host import segments
from omni_actors.host.processes import STOPPED_LOOKS, WAITING_LOOKS, AnchoredClock, raise_file_limit, until_done
from omni_actors.host.segments import Segment
from omni_actors.launcher.children import LAST, last_words
from omni_actors.launcher.replica_processes import SegmentLedger
from omni_actors.protocol.fields import ReplicaId
from tests.support.clock import Clock
from tests.support.commands import python
from tests.support.paths import REPOSITORY
from tests.support.segments import holder
from tests.support.waiting import eventually


def test_the_file_limit_is_raised_as_far_as_it_may_be() -> None:
    code = "from omni_actors.host.processes import raise_file_limit as f; print(f(64))"
    limited = python("-c", code, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512)), check=True)
    assert int(limited.stdout) == 512 - 64
    assert raise_file_limit(64) <= resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.parametrize(("stop", "looks"), [(True, STOPPED_LOOKS), (False, WAITING_LOOKS)])
async def test_a_process_that_waits_gets_longer_than_one_that_was_stopped(
    monkeypatch: pytest.MonkeyPatch, stop: bool, looks: int
) -> None:
    monkeypatch.setattr("omni_actors.host.processes.STILL_SECONDS", 0.02)
    process = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None  # noqa: PT018
    process.stdin.write(b"it runs\n")
    assert await process.stdout.readline() == b"it runs\n"
    worker, looked, killed = psutil.Process(process.pid), list[psutil.Process](), list[int]()
    monkeypatch.setattr(worker, "kill", lambda: (killed.append(len(looked)), process.kill()))
    if stop:
        worker.suspend()
        await eventually(lambda: worker.status() == psutil.STATUS_STOPPED)

    def workers() -> list[psutil.Process]:
        looked.append(worker)
        return [worker]

    await until_done(asyncio.ensure_future(process.wait()), workers)
    assert process.returncode == -signal.SIGKILL
    assert looks < killed[0] < looks + 4


def test_a_clock_does_not_follow_when_the_wall_clock_is_set() -> None:
    wall, monotonic = Clock(5000.0), Clock(10.0)
    clock = AnchoredClock(wall, monotonic)
    wall.now, monotonic.now = 0.0, 12.5
    assert clock() == 5002.5
    assert clock.of(11.0) == 5001.0


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


LAUNCHER = """
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from omni_actors.launcher.replica_processes import start_light

print("the main module runs", flush=True)
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=os.write, args=(1, b"a child runs\\n")) for _ in range(3)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(start_light, processes))
    for process in processes:
        process.join(60)
    print("the main module is", __import__("sys").modules["__main__"].__file__)
"""


def test_processes_of_stages_do_not_run_the_launchers_main_module(tmp_path: Path) -> None:
    """multiprocessing would have them do so, which takes longer than the start of an echo stage."""
    program = tmp_path / "main.py"
    program.write_text(LAUNCHER)
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    main, *children, main_again = done.stdout.splitlines()
    assert main == "the main module runs"
    assert children == ["a child runs"] * 3
    assert main_again == f"the main module is {program}"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            f"listening\nTraceback:\n  File x\nOSError: no file\n\n2026 ERROR http uvicorn.error: {LAST}\n",
            "OSError: no file",
        ),
        ("ModuleNotFoundError: No module named 'av'\n", "No module named 'av'. Run pip install"),
        ("\n", "its log is empty"),
    ],
)
def test_what_is_said_of_a_server_that_does_not_start_is_the_reason(log: str, words: str) -> None:
    assert words in last_words(log)
