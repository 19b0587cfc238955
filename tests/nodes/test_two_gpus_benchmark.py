"""The benchmark of a pipeline's ways over two GPUs, with echo stages: what it measures and says of a failure."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.builders import chain, write
from tests.support.paths import REPOSITORY
from tests.support.processes import assert_nothing_left

pytestmark = pytest.mark.nightly

LOAD = ["--concurrency", "2", "--text-tokens", "8", "--codec-tokens", "8"]


def test_each_way_is_measured_and_one_that_fails_does_not_hide_the_others(short_path):
    """Echo stages take no tensor_parallel_size, so that part d fails."""
    logs, report = short_path / "logs", short_path / "report.json"
    command = [sys.executable, "benchmarks/two_gpus.py", str(write(short_path, chain())), "--load-format", ""]
    command += ["--parts", "d", "b", "--limit", "60", "--logs", str(logs), "--json", str(report), *LOAD]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "d failed: RuntimeError: launcher ended with exit code 2" in run.stdout
    assert "engine.tensor_parallel_size: unknown key" in run.stdout
    table = [line.strip("| ").split(" | ") for line in run.stdout.splitlines() if line.startswith("|")][2:]
    assert [(row[0][:2], row[2]) for row in table] == [("d:", "-"), ("b:", "c=2 over HTTP")]
    for name, ready, _, rate, *_ in table:
        assert (float(ready) > 0) == (rate != "-") == (name[0] != "d")
    outcomes = {outcome["part"]: outcome for outcome in json.loads(report.read_text())["rows"]}
    assert [row["requests"] for row in outcomes["b"]["rows"]] == [3]
    second = (logs / "b/node-1.log").read_text()
    assert "node 1 serves" in second
    assert "--keys" in second.splitlines()[0]
    assert sorted(path.name for path in logs.glob("b/stages-1/*.log")) == ["code2wav-1.log", "talker-1.log"]
    assert_nothing_left(logs)
