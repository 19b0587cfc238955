"""The launchers as scripts: what they decide (launchers.bats), and that nothing outlives them.

The nodes are stand-ins (stubs/node); real ones: tests/nodes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from omni_actors.client import OmniClient
from tests.support.builders import chain, write
from tests.support.paths import REPOSITORY
from tests.support.scripts import STUBS, Started

BATS = REPOSITORY / "tests/launchers/launchers.bats"


@pytest.fixture
def nodes(start, short_path):
    """Starts a script whose nodes are stand-ins."""
    (short_path / "hosts.txt").write_text("first\nsecond\nthird\n")

    def begin(script: str, *arguments: str, **environment: str) -> Started:
        return start(script, *arguments, OMNI_PYTHON=str(STUBS / "node"), **environment)

    return begin


def tool(name: str) -> str:
    """Path of a command of the extra `test`."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found is not None, f"{name} is missing; it comes with the extra `test`"
    return found


def test_the_launchers_decide_as_launchers_bats_says():
    """Run by hand with `bats tests/launchers/launchers.bats`."""
    done = subprocess.run(
        [tool("bats"), str(BATS)],
        env={**os.environ, "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nok ") == BATS.read_text().count("\n@test ")


@pytest.mark.parametrize("ends", ["launcher", "node"])
def test_no_node_outlives_a_killed_launcher_or_a_node_that_gets_a_signal(nodes, ends):
    cluster = nodes("ssh_nodes.sh", "hosts.txt", "c.yaml")
    cluster.until("called with", 3)
    if ends == "launcher":
        psutil.Process(cluster.process.pid).kill()
        cluster.process.wait()
        cluster.assert_nothing_left()
    else:
        members = cluster.members().items()
        wrapper = next(pid for pid, line in members if "exit_with_stdin" in line and "--node-rank 1" in line)
        psutil.Process(wrapper).terminate()
        cluster.end()
    assert cluster.output.count("stops in order") == 3


IMPATIENT = """
import sys
from omni_actors.launcher import exit_with_stdin

exit_with_stdin.GRACE_SECONDS = 0.2
sys.exit(exit_with_stdin.main(sys.argv[1:]))
"""


SLOW = "trap 'sleep 1; exit 9' TERM; echo up; while :; do sleep 0.1; done"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 7", 7),  # of its own accord
        ("echo up; exec sleep 60", 128 + signal.SIGTERM),  # when the input closes
        ("trap '' TERM; echo up; while :; do sleep 0.1; done", 128 + signal.SIGKILL),  # it does not obey
        ("printf 60 > /dev/fd/$OMNI_ACTORS_STOP_TIME; " + SLOW, 9),  # it says that it takes longer
    ],
)
def test_a_command_ends_when_its_standard_input_closes(command, code):
    arguments = [sys.executable, "-c", IMPATIENT, "bash", "-c", command]
    with subprocess.Popen(arguments, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held:
        held.stdin.write(b"what comes in is of no interest\n")
        held.stdin.flush()
        if held.stdout.readline():
            assert held.poll() is None
            held.stdin.close()
        assert held.wait(20) == code


@pytest.mark.timeout(120)
def test_a_launcher_has_the_time_that_its_pipeline_gives_requests_to_finish(short_path):
    data = chain()
    data["stages"][1]["engine"] = {"step_seconds": 0.1}
    data["coordinator"] = {"drain_timeout": 60.0, "run_dir": str(short_path / "run")}
    launch = [sys.executable, "-m", "omni_actors.launch", str(write(short_path, data))]
    with subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *launch], cwd=REPOSITORY, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as held:
        assert held.stderr is not None
        assert next((line for line in held.stderr if b"ready after" in line), b"")
        with OmniClient(f"ipc://{short_path}/run/client") as client:
            stream = client.submit("20 steps, for instance", modalities=["text"], timeout=60)
            said = []
            for item in stream:
                said.append(item)
                held.stdin.close()
        assert "".join(item.text for item in said) == "20 steps, for instance"
        assert held.wait(60) == 0


@pytest.mark.parametrize(("arguments", "code"), [(["/nowhere/at/all"], 127), ([], 2)])
def test_a_command_that_cannot_run_gives_a_shells_exit_code(arguments, code):
    command = [sys.executable, "-m", "omni_actors.launcher.exit_with_stdin", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, stdin=subprocess.PIPE, capture_output=True, timeout=20, check=False)
    assert done.returncode == code
    assert done.stderr


JOB = {"SLURM_JOB_ID": "1234567", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "OMNI_DIR": str(REPOSITORY)}


@pytest.mark.nightly
def test_slurm_with_real_nodes(start, short_path):
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
