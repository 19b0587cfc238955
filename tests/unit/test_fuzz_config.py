"""A short run of the configuration's fuzzer; its full minute is run by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.nightly


def test_mutated_pipelines_are_accepted_or_refused(tmp_path: Path) -> None:
    script = str(REPOSITORY / "scripts" / "fuzz_config.py")
    command = [sys.executable, script, "--seconds", "2", "--seed", "3", "--most", str(2.0 * PATIENCE)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " accepted" in done.stdout
    assert " refused" in done.stdout
    assert list(tmp_path.iterdir()) == [], "an input is kept only if it did what none may do"
