"""Ending with the parent, restarting with back-off, exit codes."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest

from omni_actors.host.processes import Backoff, describe_exit, raise_file_limit


def test_the_first_restart_is_immediate_and_later_delays_double() -> None:
    backoff = Backoff(first=0.5, last=3.0)
    assert [backoff.next(now) for now in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.restarts == 6


def test_the_limit_counts_restarts_within_the_window() -> None:
    backoff = Backoff(first=1.0, last=30.0, limit=2, window=10.0)
    assert backoff.next(100.0) == 0.0
    assert backoff.next(105.0) == 1.0
    assert backoff.next(109.9) is None
    assert backoff.restarts == 2, "a refused restart is not counted"
    assert backoff.next(110.0) == 1.0, "the first restart has left the window"
    assert backoff.next(200.0) == 0.0, "all have left it"


def test_a_limit_of_zero_allows_no_restart() -> None:
    assert Backoff(first=1.0, last=30.0, limit=0).next(0.0) is None


def test_a_reset_forgets_earlier_restarts() -> None:
    backoff = Backoff(first=1.0, last=30.0, limit=1)
    backoff.next(0.0)
    backoff.reset()
    assert backoff.restarts == 0
    assert backoff.next(1.0) == 0.0


def test_delays_stay_finite_after_thousands_of_restarts() -> None:
    backoff = Backoff(first=0.5, last=30.0)
    assert {backoff.next(0.0) for _ in range(5000)} == {0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0}


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-signal.SIGKILL, "killed by signal 9"),
        (None, "ended without an exit code"),
    ],
)
def test_exit_codes_are_described(code: int | None, text: str) -> None:
    assert describe_exit(code) == text


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
    assert parent.stdout is not None
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
