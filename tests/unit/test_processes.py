"""Ending with the parent, open files, and the clock of a process."""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import psutil

from omni_actors.host.processes import AnchoredClock, raise_file_limit
from tests.support.clock import Clock

CHILD = "import time; from omni_actors.host.processes import die_with_parent; die_with_parent(); print(1, flush=True); "
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD + "time.sleep(60)"!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_child_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin is not None
    with parent.stdin, parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 10
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_the_file_limit_is_raised_as_far_as_it_may_be() -> None:
    code = "from omni_actors.host.processes import raise_file_limit as f; print(f(64))"
    limited = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(limited.stdout) == 512 - 64
    assert raise_file_limit(64) <= resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_clock_does_not_follow_when_the_wall_clock_is_set() -> None:
    wall, monotonic = Clock(5000.0), Clock(10.0)
    clock = AnchoredClock(wall, monotonic)
    wall.now, monotonic.now = 0.0, 12.5
    assert clock() == 5002.5
    assert clock.of(11.0) == 5001.0
