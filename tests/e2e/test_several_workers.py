"""A stage on several workers answers like one on one, and its workers die with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch

from omni_actors.launcher.replica_processes import SegmentLedger
from omni_actors.protocol.fields import ReplicaId
from tests.support.paths import REPOSITORY
from tests.support.processes import shared_memory_of
from tests.support.several_workers import START, answer
from tests.support.stage_driver import Driver, make_engine

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

# vLLM gives each of its CPU workers a NUMA node of its own unless told which cores to take.
CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "stage", "start", "end"),
    [
        ("tiny_checkpoint", 2, 1, "talker", "fork", "in order"),
        ("tiny_checkpoint", 2, 2, "thinker", "fork", "killed"),
        ("tiny_checkpoint", 1, 2, "talker", "spawn", "killed"),
        ("tiny_qwen3_checkpoint", 2, 1, "thinker", "fork", "in order"),
        ("tiny_qwen3_checkpoint", 2, 1, "talker", "fork", "killed"),
    ],
)
def test_several_workers_answer_like_one_and_die_with_their_stage(
    request, short_path, family, tensor, pipeline, stage, start, end
):
    checkpoint = request.getfixturevalue(family)
    frames = family == "tiny_qwen3_checkpoint" and stage == "talker"
    workers = tensor * pipeline
    spread_by = json.dumps({"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline})
    cores = "|".join(str(CORES[rank % len(CORES)]) for rank in range(workers))
    command = [sys.executable, "-m", "tests.support.several_workers", str(checkpoint), stage, spread_by]
    ledger = SegmentLedger(short_path / "segments")
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": cores, "TMPDIR": str(short_path), START: start},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as spread:
        try:
            driver = Driver(make_engine(checkpoint, stage, asynchronous=True))
            one = answer(driver, str(checkpoint), stage)
            driver.engine.shutdown()
            assert spread.stdout is not None
            said = next((line for line in spread.stdout if line.startswith("{")), "")
            assert said, "it ended without an answer; its output above says why"
            several = json.loads(said)
            assert len(several["workers"]) >= workers
            assert all(is_running(pid) for pid in several["workers"])
            shared = shared_memory_of(dict.fromkeys([spread.pid, *several["workers"]], ""))
            assert any("vllm_dist_" in path for path in shared) == hasattr(torch.ops._C, "init_shm_manager")
            ledger.look({ReplicaId(stage, 0, 1): spread.pid})
            if end == "in order":
                spread.communicate()
                assert spread.returncode == 0
        finally:
            spread.kill()
    # A thinker writes 16 tokens and, with that of Qwen3-Omni, streams those of its prompt and all but the last again.
    assert all(len(tokens) >= (15 * 16 if frames else 16) for tokens in several["tokens"])
    assert len(several["tokens"]) == (4 if stage == "thinker" else 3)
    assert several["tokens"] == one["tokens"]
    assert several["rows"] == pytest.approx(one["rows"], rel=1e-5)
    rows = several["rows"] if family == "tiny_checkpoint" else several["rows"][3:]  # of media alone
    assert stage == "talker" or all(total > 0 for total in rows)
    assert not any(several["left"].values())
    deadline = time.monotonic() + 20.0
    while (left := [pid for pid in several["workers"] if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    ledger.sweep([ReplicaId(stage, 0, 1)])
    assert [path for path in shared if os.path.exists(path)] == []


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
