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
from tests.support.commands import python
from tests.support.paths import REPOSITORY
from tests.support.scripts import STUBS, Started
from tests.support.servers import free_port

BATS = REPOSITORY / "tests/launchers/launchers.bats"


@pytest.fixture
def nodes(start, short_path):
    """Starts a script whose nodes are stand-ins."""
    (short_path / "hosts.txt").write_text("first\nsecond\nthird\n")

    def begin(script: str, *arguments: str, **environment: str) -> Started:
        return start(script, *arguments, OMNI_PYTHON=str(STUBS / "node"), **environment)

    return begin


def test_the_launchers_decide_as_launchers_bats_says():
    """Run by hand with `bats tests/launchers/launchers.bats`."""
    bats = shutil.which("bats", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert bats is not None, "bats is missing; it comes with the extra `test`"
    options = {"env": {**os.environ, "PYTHON": sys.executable}, "stdin": subprocess.DEVNULL, "timeout": 280}
    done = subprocess.run([bats, str(BATS)], capture_output=True, text=True, **options)
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
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", IMPATIENT, *launch], cwd=REPOSITORY, **pipes) as held:
        assert next((line for line in held.stderr if b"ready after" in line), b"")
        with OmniClient(f"ipc://{short_path}/run/client") as client:
            stream = client.submit("20 steps, for instance", modalities=["text"], timeout=60)
            said = []
            for item in stream:
                said.append(item)
                held.stdin.close()
        assert "".join(item.text for item in said) == "20 steps, for instance"
        assert held.wait(60) == 0


def test_a_command_that_cannot_run_gives_a_shells_exit_code():
    for arguments, code in ((["/nowhere/at/all"], 127), ([], 2)):
        done = python("-m", "omni_actors.launcher.exit_with_stdin", *arguments, stdin=subprocess.PIPE)
        assert (done.returncode, bool(done.stderr)) == (code, True)


JOB = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["slurm.sbatch", "ssh_nodes.sh"])
def test_real_nodes(start, short_path, script):
    """Rank, number of nodes and the first node's address are found in Slurm's variables, or in the file of hosts."""
    data = chain()
    for stage in data["stages"][2:]:
        stage["node"] = 1
    (short_path / "hosts").write_text("127.0.0.1\n127.0.0.1\n")
    hosts, port = ([str(short_path / "hosts")], free_port()) if script == "ssh_nodes.sh" else ([], 0)
    environment = {"OMNI_PORT": str(port)} if port else JOB
    job = start(script, *hosts, str(write(short_path, data)), OMNI_DIR=str(REPOSITORY), **environment)
    job.until("node 1 serves")
    job.until("ready after")
    assert "talker/0, code2wav/0 on node 1" in job.output
    job.process.terminate()
    assert job.end() == 0
