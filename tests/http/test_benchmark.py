"""The benchmark of a running pipeline, at toy size: it measures what its table says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.servers import HttpPipeline

pytestmark = pytest.mark.nightly


def test_a_load_is_measured_over_both_ways(echo: HttpPipeline, tmp_path: Path) -> None:
    report = tmp_path / "serve.json"
    command = [sys.executable, "benchmarks/serve.py", "--endpoint", echo.endpoint, "--http", echo.url]
    command += ["--concurrency", "2", "--rounds", "2", "--text-tokens", "8", "--codec-tokens", "8"]
    subprocess.run([*command, "--json", str(report)], cwd=REPOSITORY, check=True, timeout=120)
    ours, http = json.loads(report.read_text())["rows"]
    assert (ours["load"], http["load"]) == ("c=2", "c=2 over HTTP")
    for row in (ours, http):
        assert row["requests"] == 4
        assert row["stalled"].endswith(" of 4")
        ttft, ttfa, smooth, end = (
            float(row[name].split(" / ")[0]) for name in ("ttft_ms", "ttfa_ms", "smooth_start_ms", "e2e_s")
        )
        assert ttft > 0
        assert 0 < ttfa <= smooth <= 1000 * end + 10
    seconds = [round(row["audio_s_per_s"] / row["req_per_s"], 2) for row in (ours, http)]
    assert seconds[0] == seconds[1] > 0, "both hear all of the sound"
    assert ours["prompt_tokens"] == http["prompt_tokens"]
