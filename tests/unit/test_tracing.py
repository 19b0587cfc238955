"""Coverage counts what is ours, also next to calls that it leaves out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import coverage

from tests.support.paths import REPOSITORY

SCRIPT = """
from tests.support.tracing import untraced

def theirs():
    return 1

def ours():
    one = untraced(theirs)()
    two = one + 1
    return two

def caller():
    two = ours()
    return two + 1

assert caller() == 3
"""


def test_calls_that_are_left_out_change_nothing_for_their_callers(tmp_path: Path) -> None:
    script, data = tmp_path / "script.py", tmp_path / "data"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "coverage", "run", "--rcfile=/dev/null", f"--data-file={data}", str(script)]
    subprocess.run(command, check=True, env={"PYTHONPATH": str(REPOSITORY)}, timeout=60)
    measured = coverage.CoverageData(str(data))
    measured.read()
    lines = set(measured.lines(str(script)) or ())
    missing = {number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.strip()} - lines
    assert missing == {SCRIPT.splitlines().index("    return 1") + 1}, "only what is not ours"
