"""benchmarks/simulate_balance.py tells ways of choosing a replica apart, with the coordinator's own decisions."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.nightly


def run(script: str, *options: str) -> str:
    command = [sys.executable, f"benchmarks/{script}", *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True).stdout


def test_turns_stay_with_their_prefix_and_speech_with_its_text() -> None:
    out = run("simulate_balance.py", "--hosts", "10", "--seconds", "30", "--settings", "requests", "default")
    before, now = (json.loads(line) for line in out.splitlines())
    assert before["requests"] > 100 < now["requests"]
    for name, least in (("prompt cached", 20), ("speech on one host", 80)):
        assert share(now, name) > max(least, 2 * share(before, name)), (before, now)


def share(row: dict[str, Any], name: str) -> int:
    return int(row[name].removesuffix("%"))


def test_costs_of_decisions_are_measured_at_two_sizes() -> None:
    out = run("simulate_routing.py", "--requests", "2000", "--replicas", "80", "--turnover", "100", "--choices")
    small, large = (json.loads(part) for part in out.replace("}\n{", "}\n\0{").split("\0"))
    assert [(row["replicas"], row["in flight"]) for row in (small, large)] == [(8, 200), (80, 2000)]
    for row in (small, large):
        costs = row["microseconds"]
        assert 0 < costs["choice of a replica, with the timer"] < costs["admission and binding"]
        assert costs["whole request (20 deltas, 5 chunks)"] > costs["admission and binding"] + costs["text delta"]
    assert large["held by the lost replica"] > 0
