"""Ending with the parent, restarting with back-off, exit codes."""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import psutil

from omni_actors.host.processes import raise_file_limit

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
