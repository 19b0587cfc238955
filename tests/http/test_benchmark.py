"""Benchmarks that measure a running pipeline over HTTP, at toy size: they measure what their table says."""

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


def test_pictures_of_mixed_sizes_are_measured_over_http(pictures: HttpPipeline, tmp_path: Path) -> None:
    report = tmp_path / "pictures.json"
    command = [sys.executable, "benchmarks/pictures.py", "--http", pictures.url, "--concurrency", "1", "3"]
    command += ["--sizes", "64x64", "128x64", "--rounds", "4", "--steps", "5", "--json", str(report)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=120)
    rows = json.loads(report.read_text())["rows"]
    assert [(row["load"], row["pictures"], row["steps"]) for row in rows] == [("c=1", 6, 5), ("c=3", 12, 5)]
    for row in rows:
        first, whole, small, large = (
            float(row[name].split(" / ")[0]) for name in ("first_progress_ms", "picture_s", "64x64_s", "128x64_s")
        )
        assert 0 < first <= 1000 * whole + 1
        assert min(small, large) <= whole <= max(small, large)
        assert row["pictures_per_s"] > 0
