"""The benchmark of losses under load, with echo stages: it measures what its table says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.builders import chain, write
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.nightly


def test_losses_under_load_with_a_spare(tmp_path):
    data = chain()
    for stage in data["stages"]:
        stage["engine"] = {"step_seconds": 0.01}
    command = [sys.executable, "benchmarks/recovery.py", str(write(tmp_path, data)), "--streams", "3", "--runs", "1"]
    command += ["--spares", "1", "--stages", "talker", "--json", str(tmp_path / "report.json")]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    undisturbed, loss = json.loads((tmp_path / "report.json").read_text())
    assert undisturbed["done"] == 3
    assert (loss["spares"], loss["stage"]) == (1, "talker")
    assert loss["done"] >= 3
    assert loss["failed"] == loss["short"] == loss["other"] == 0
    assert loss["ready"] > loss["start"] > 0, "a new process"
    assert "(first start of talker/1)" in run.stdout
