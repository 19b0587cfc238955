"""A stage on two workers answers like one on one, and its workers die with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.errors import ConfigError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

COMMAND = [sys.executable, "-m", "tests.e2e.tensor_parallel"]
# vLLM gives each of its CPU workers a NUMA node of its own unless told which cores to take.
ENVIRONMENT = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0|0"}


def test_two_workers_answer_like_one(tiny_checkpoint: Path) -> None:
    command = [*COMMAND, str(tiny_checkpoint)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    for stage, (one, two) in result.items():
        assert [len(tokens) for tokens in two["tokens"]] == [16, 16, 16], stage
        assert two["tokens"] == one["tokens"], stage
        assert two["rows"] == pytest.approx(one["rows"], rel=1e-5), stage
        assert not any(two["left"].values()), stage
        assert two["workers"] >= one["workers"] + 2, stage
    assert all(total > 0 for total in result["thinker"][1]["rows"])


def test_workers_do_not_outlive_their_stage(tiny_checkpoint: Path) -> None:
    command = [*COMMAND, str(tiny_checkpoint), "--hang"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as stage:
        lines = iter(stage.stdout.readline, "")
        workers = json.loads(next(line for line in lines if line.startswith("[") and line.strip().endswith("]")))
        assert len(workers) >= 2
        stage.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while (left := [pid for pid in workers if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("kind", "stage", "engine", "match"),
    [
        ("diffusion", "code2wav", {"tensor_parallel_size": 2}, "one GPU"),
        ("autoregressive", "talker", {"tensor_parallel_size": 0}, "whole number"),
        ("autoregressive", "talker", {"tensor_parallel_size": True}, "whole number"),
        ("autoregressive", "talker", {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
)
def test_other_ways_to_spread_a_stage_are_refused(tiny_checkpoint: Path, kind, stage, engine, match) -> None:
    arguments = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), stage), kind, engine)
    with pytest.raises(ConfigError, match=match):
        arguments.create_engine_config()
