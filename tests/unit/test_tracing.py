"""Coverage counts what is ours, also next to calls that it leaves out."""

from __future__ import annotations

import colorsys
import subprocess
import sys
from pathlib import Path

import coverage
import pytest

from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.nightly

SCRIPT = """
from tests.support.startup.untraced import untraced

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


IMPORTING = """
import subprocess, sys
subprocess.run([sys.executable, sys.argv[1]], check=True)
"""
OURS = """
import wave

def after():
    import colorsys
    return colorsys.rgb_to_hsv(1, 1, 1)

after()
"""


def test_imports_of_what_is_not_ours_are_left_out_and_their_importers_counted(tmp_path: Path) -> None:
    parent, ours, data = tmp_path / "parent.py", tmp_path / "ours.py", tmp_path / "data"
    parent.write_text(IMPORTING)
    ours.write_text(OURS)
    settings = tmp_path / "settings"
    settings.write_text(
        f"[run]\nparallel = true\npatch = subprocess\ncover_pylib = true\ndata_file = {data}\n"
        f"include =\n    {ours}\n    */colorsys.py\n"
    )
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", str(parent), str(ours)]
    startup = REPOSITORY / "tests" / "support" / "startup"
    subprocess.run(command, check=True, env={"PYTHONPATH": str(startup)}, timeout=60, capture_output=True)
    subprocess.run([sys.executable, "-m", "coverage", "combine", f"--rcfile={settings}"], check=True, timeout=60)
    measured = coverage.CoverageData(str(data))
    measured.read()
    lines = {Path(file).name: set(measured.lines(file) or ()) for file in measured.measured_files()}
    assert lines["ours.py"] == {number for number, line in enumerate(OURS.splitlines(), 1) if line.strip()}
    definition = int(colorsys.rgb_to_hsv.__code__.co_firstlineno)
    assert definition not in lines["colorsys.py"], "what its import executed"
    assert definition + 1 in lines["colorsys.py"], "a function that was called later"
