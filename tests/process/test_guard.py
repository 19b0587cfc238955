"""Processes that tests start end with pytest, even when no fixture is torn down."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.processes import assert_nothing_left, processes_of

SESSION = """
import sys
from pathlib import Path
from tests.support import guard
from tests.support.launcher import EchoLauncher
from tests.support.builders import chain

guard.begin()
EchoLauncher(Path(sys.argv[1]), chain()).wait_ready()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_ends_with_the_session_that_started_it(short_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", SESSION, str(short_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as session:
        assert session.stdout is not None
        assert session.stdout.readline() == b"ready\n"
        assert len(processes_of(short_path)) >= 5
        session.send_signal(number)
    assert_nothing_left(short_path, 8.0)
