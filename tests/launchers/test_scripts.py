"""What the scripts themselves decide: commands, ends, exit codes. The nodes are stand-ins; real ones: tests/nodes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launchers.conftest import REPOSITORY, Started
from tests.unit.builders import chain, write

SCRIPTS = sorted(
    path for pattern in ("launch/*.sh", "launch/*.sbatch", "scripts/*.sh") for path in REPOSITORY.glob(pattern)
)
FAST_SECONDS = 5.0

# Stands in for the interpreter: omni_actors.launch is a node that says how it was called, then does as FAKE says.
NODE = f"""#!/usr/bin/env bash
[[ $2 == omni_actors.launch ]] || exec {sys.executable} "$@"
rank=${{SLURM_NODEID:-0}}
said="called with"
for word in "${{@:3}}"; do said+=" <$word>"; done
while [[ $# -gt 0 ]]; do [[ $1 != --node-rank ]] || rank=$2; shift; done
trap 'echo "node $rank stops in order"; exit 0' TERM INT
echo "$said"
[[ ${{FAKE:-}} != "fail $rank" ]] || {{ sleep 0.3; echo "node $rank cannot load"; exit 3; }}
[[ ${{FAKE:-}} != "end $rank" ]] || {{ sleep 0.3; exit 0; }}
for ((turn = 0; turn < 600; turn++)); do sleep 0.05; done
"""


@pytest.fixture
def nodes(start: Callable[..., Started], short_path: Path) -> Callable[..., Started]:
    """Starts a script whose nodes are stand-ins."""
    python = short_path / "python"
    python.write_text(NODE)
    python.chmod(0o755)
    (short_path / "hosts.txt").write_text("# the cluster\nadmin@first # runs the coordinator\n\n second  \n\tthird\n")

    def begin(script: str, *arguments: str, **environment: str) -> Started:
        return start(script, *arguments, OMNI_PYTHON=str(python), **environment)

    return begin


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(script: Path) -> None:
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert checker is not None, "shellcheck is missing; it comes with the extra `test`"
    done = subprocess.run(
        [checker, "--external-sources", str(script)], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_they_stay_small() -> None:
    assert {path.name: len(path.read_text().splitlines()) for path in REPOSITORY.glob("launch/*")
            if len(path.read_text().splitlines()) > 80 and path.suffix != ".md"} == {}  # fmt: skip


@pytest.mark.parametrize("script", ["single_node.sh", "ssh_nodes.sh", "slurm.sbatch"])
def test_help(nodes: Callable[..., Started], script: str) -> None:
    environment = {"OMNI_DIR": str(REPOSITORY)}
    helped = nodes(script, "--help", **environment)
    assert helped.end() == 0
    assert f"launch/{script}" in helped.output
    assert "source" not in helped.output
    assert nodes(script, **environment).end() == 2


def test_single_node(nodes: Callable[..., Started]) -> None:
    node = nodes("single_node.sh", "a config.yaml", "--http", "127.0.0.1:0")
    node.until("called with")
    assert "called with <a config.yaml> <--http> <127.0.0.1:0>\n" in node.output
    assert node.end(signal.SIGTERM) == 0


# -- ssh --------------------------------------------------------------------------------------------------------------


def test_every_host_gets_its_command(nodes: Callable[..., Started], short_path: Path) -> None:
    cluster = nodes("ssh_nodes.sh", "hosts.txt", "c.yaml", "--set", "name=it's $HOME", OMNI_PORT="7001")
    cluster.until("called with", 3)
    assert sorted((short_path / "hosts").read_text().split()) == ["admin@first", "second", "third"]
    common = "<--master-addr> <first> <--master-port> <7001>"
    extra = "<--set> <name=it's $HOME>"
    for rank, host, headless in ((0, "admin@first", ""), (1, "second", " <--headless>"), (2, "third", " <--headless>")):
        own = f"<c.yaml> <--nnodes> <3> <--node-rank> <{rank}>"
        assert f"[{rank} {host}] called with {own} {common}{headless} {extra}\n" in cluster.output


def test_ctrl_c_ends_all_in_order(nodes: Callable[..., Started]) -> None:
    cluster = nodes("ssh_nodes.sh", "hosts.txt", "c.yaml")
    cluster.until("called with", 3)
    began = time.monotonic()
    assert cluster.end(signal.SIGINT) == 0
    assert time.monotonic() - began < FAST_SECONDS
    assert all(f"node {rank} stops in order" in cluster.output for rank in range(3))


@pytest.mark.parametrize("rank", [0, 2])
def test_one_failing_node_ends_all(nodes: Callable[..., Started], rank: int) -> None:
    began = time.monotonic()
    cluster = nodes("ssh_nodes.sh", "hosts.txt", "c.yaml", FAKE=f"fail {rank}")
    assert cluster.end() == 3
    assert time.monotonic() - began < FAST_SECONDS
    assert f"node {rank} cannot load" in cluster.output
    assert "exit code 3; ending all" in cluster.output
    assert cluster.output.count("stops in order") == 2
    cluster.assert_nothing_left(1.0)


def test_a_node_that_ends_well_ends_all_well(nodes: Callable[..., Started]) -> None:
    cluster = nodes("ssh_nodes.sh", "hosts.txt", "c.yaml", FAKE="end 0")
    assert cluster.end() == 0
    assert cluster.output.count("stops in order") == 2


def test_no_node_outlives_a_killed_launcher(nodes: Callable[..., Started]) -> None:
    cluster = nodes("ssh_nodes.sh", "hosts.txt", "c.yaml")
    cluster.until("called with", 3)
    os.kill(cluster.process.pid, signal.SIGKILL)
    cluster.process.wait()
    cluster.assert_nothing_left(FAST_SECONDS)
    assert cluster.output.count("stops in order") == 3


def test_a_node_that_is_told_to_end_ends_all(nodes: Callable[..., Started]) -> None:
    cluster = nodes("ssh_nodes.sh", "hosts.txt", "c.yaml")
    cluster.until("called with", 3)
    leash = next(pid for pid, command in cluster.members().items() if "leash" in command and "--node-rank 1" in command)
    os.kill(leash, signal.SIGTERM)
    cluster.end()
    assert cluster.output.count("stops in order") == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["hosts.txt"], "the pipeline's YAML"), (["nowhere", "c.yaml"], "cannot read"), (["/dev/null", "c"], "no host")],
)
def test_wrong_usage(nodes: Callable[..., Started], arguments: list[str], said: str) -> None:
    cluster = nodes("ssh_nodes.sh", *arguments)
    assert cluster.end() == 2
    assert said in cluster.output


LEASH = "import sys; from omni_actors import leash; leash.GRACE_SECONDS = 0.2; sys.exit(leash.main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 7", 7),  # by itself
        ("echo up; exec sleep 60", 128 + signal.SIGTERM),  # when the input closes
        ("trap '' TERM; echo up; while :; do sleep 0.1; done", 128 + signal.SIGKILL),  # it does not obey
    ],
)
def test_the_leash(command: str, code: int) -> None:
    arguments = [sys.executable, "-c", LEASH, "bash", "-c", command]
    with subprocess.Popen(arguments, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held:
        assert held.stdin is not None
        assert held.stdout is not None
        held.stdin.write(b"what comes in is of no interest\n")
        held.stdin.flush()
        if held.stdout.readline():
            assert held.poll() is None
            held.stdin.close()
        assert held.wait(20) == code


@pytest.mark.parametrize(("arguments", "code"), [(["/nowhere/at/all"], 127), ([], 2)])
def test_a_leash_without_a_command(arguments: list[str], code: int) -> None:
    command = [sys.executable, "-m", "omni_actors.leash", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, stdin=subprocess.PIPE, capture_output=True, timeout=20, check=False)
    assert done.returncode == code
    assert done.stderr


# -- slurm ------------------------------------------------------------------------------------------------------------

JOB = {"SLURM_JOB_ID": "1234567", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "OMNI_DIR": str(REPOSITORY)}


def test_slurm_starts_one_task_a_node(nodes: Callable[..., Started], short_path: Path) -> None:
    job = nodes("slurm.sbatch", "c.yaml", "--keys", "a folder", **JOB)
    job.until("called with", 2)
    assert job.output.count("called with <c.yaml> <--master-port> <24567> <--keys> <a folder>\n") == 2
    called = (short_path / "srun").read_text()
    assert all(option in called for option in ("--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=5"))
    # scancel and the end of the job's time: TERM to the batch script alone.
    job.process.terminate()
    assert job.end() == 0
    assert job.output.count("stops in order") == 2


def test_slurm_hands_on_a_failure(nodes: Callable[..., Started]) -> None:
    job = nodes("slurm.sbatch", "c.yaml", FAKE="fail 1", **JOB)
    assert job.end() == 3
    assert "node 1 cannot load" in job.output


def test_slurm_outside_of_a_job(nodes: Callable[..., Started]) -> None:
    job = nodes("slurm.sbatch", "c.yaml", OMNI_DIR=str(REPOSITORY))
    assert job.end() == 2
    assert "no Slurm job" in job.output


def test_slurm_with_real_nodes(start: Callable[..., Started], short_path: Path) -> None:
    """Rank, number of nodes and the first node's address are found in Slurm's variables alone."""
    data = chain()
    for stage in data["stages"][2:]:
        stage["node"] = 1
    config = write(short_path, data)
    job = start("slurm.sbatch", str(config), **{**JOB, "SLURM_JOB_ID": str(os.getpid())})
    job.until("node 1 serves")
    job.until("ready after")
    assert "talker/0, code2wav/0 on node 1" in job.output
    job.process.terminate()
    assert job.end() == 0
