"""Benchmarks that no other test runs, at toy size: they measure what their table says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.paths import REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

CONFIG = "stage_configs/tiny_qwen2_5_omni.yaml"


def measured(tmp_path, name, *arguments):
    """The rows of a benchmark's report, and what it printed."""
    report = tmp_path / "report.json"
    command = [sys.executable, f"benchmarks/{name}.py", *arguments, "--json", str(report)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(report.read_text())["rows"], run.stdout


def test_memory_of_a_stage_by_load(tiny_checkpoint, tmp_path):
    load = ["--stages", "talker", "code2wav", "--output-tokens", "3", "--concurrency", "1", "2"]
    load += ["--prompt-tokens", "40", "--codec-tokens", "20"]
    rows, printed = measured(tmp_path, "memory", CONFIG, "--model", str(tiny_checkpoint), *load)
    assert [(row["stage"], row["tokens"], row["requests"]) for row in rows] == [
        (stage, tokens if requests else 0, requests)
        for stage, tokens in (("talker", 40), ("code2wav", 20))
        for requests in (0, 1, 2)
    ]
    assert all(row["rss_gib"] > 0.1 for row in rows)
    assert [row["kv_cache_gib"] for row in rows if "kv_cache_gib" in row] == [0.06], "64 MiB, as the YAML says"
    width = json.loads((tiny_checkpoint / "config.json").read_text())["talker_config"]["embedding_size"]
    embeddings = {(row["stage"], row["requests"]): row.get("embeddings_mib") for row in rows}
    # A row for each token of the prompt, for the first of the reply and for each that the talker makes.
    assert embeddings["talker", 2] == pytest.approx(2 * (40 + 1 + 3) * width * 4 / 2**20, abs=0.006)
    held = [row["held_mib"] for row in rows if "held_mib" in row]
    assert 0 < held[0] < held[1]
    assert len(printed[printed.index("| stage |") :].splitlines()) == 2 + len(rows), "the table comes last"


def test_turns_of_a_conversation(tiny_pipeline, tmp_path):
    load = ["--turns", "3", "--people", "2", "--repeats", "1", "--text-tokens", "4", "--codec-tokens", "6"]
    rows, _ = measured(tmp_path, "turns", "--endpoint", tiny_pipeline.endpoint, *load)
    assert [row["turn"] for row in rows] == [1, 2, 3]
    lengths = [row["prompt_tokens"] for row in rows]
    assert lengths == sorted(set(lengths)), "each turn holds those before it"
    assert all(0 < row["first_text_ms"] < row["first_sound_ms"] for row in rows)
