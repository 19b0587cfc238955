"""Ranks of one engine on two hosts, which meet over gloo, answer like one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_actors.config.spread import RankPlan
from tests.support.network import Network
from tests.support.paths import REPOSITORY, import_path
from tests.support.several_workers import START, answer
from tests.support.stage_driver import Driver, make_engine
from tests.support.waiting import until

pytestmark = pytest.mark.nightly

DEVICE = "omni0"


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("stage", "how", "begin"), [("thinker", "tensor", "spawn"), ("talker", "pipeline", "fork")])
def test_ranks_on_two_hosts_give_the_answers_of_one_and_end_with_their_processes_as_these_with_them(
    network: Network, tiny_checkpoint: Path, short_path: Path, stage: str, how: str, begin: str
) -> None:
    """The further host's process comes late: the first one waits for it."""
    leader, other = (host.address for host in network.hosts)
    plans = [RankPlan(host, 2, leader, 29710, address, DEVICE) for host, address in enumerate((leader, other))]

    paths = {"TMPDIR": str(short_path), "PYTHONPATH": import_path()}

    def start(host: int, **output: Any) -> subprocess.Popen[str]:
        arguments = [str(tiny_checkpoint), stage, json.dumps({f"{how}_parallel_size": 2}), json.dumps(plans[host])]
        return subprocess.Popen(
            network.hosts[host].command(sys.executable, "-m", "tests.support.several_workers", *arguments),
            cwd=REPOSITORY,
            env={**os.environ, **plans[host].environment, START: begin, **paths},
            stdin=subprocess.PIPE,
            text=True,
            **output,
        )

    processes = [start(0, stdout=subprocess.PIPE)]
    try:
        driver = Driver(make_engine(tiny_checkpoint, stage, asynchronous=True))
        expected = answer(driver, str(tiny_checkpoint), stage)
        driver.engine.shutdown()
        processes.append(start(1))
        assert processes[0].stdout is not None
        said = next((line for line in processes[0].stdout if line.startswith("{")), "")
        assert said, "it ended without an answer; its output above says why"
        workers = [child for process in processes for child in psutil.Process(process.pid).children(recursive=True)]
        ranks = psutil.Process(processes[1].pid).children()
        next(rank for rank in ranks if "resource_tracker" not in " ".join(rank.cmdline())).kill()
        assert processes[1].wait(60) == 1, "the further host's process ends with its rank, and so the whole replica"
        assert lives(psutil.Process(processes[0].pid)), "the coordinator ends it"
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    found = json.loads(said)
    assert found["tokens"] == expected["tokens"]
    assert found["rows"] == pytest.approx(expected["rows"], rel=1e-5)
    assert not any(found["left"].values())
    assert len(workers) >= 2
    until(lambda: not any(map(lives, workers)), 20, "the workers")


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
