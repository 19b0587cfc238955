"""A pipeline behind keys: who has none learns why, no secret is shown, and other users of the host get nothing."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tempfile
import urllib.request
from pathlib import Path

import psutil
import pytest

from omni_actors.cli import ctl, top, trace
from omni_actors.client import OmniClient
from omni_actors.errors import Unauthorized
from omni_actors.protocol.messages import Operation
from omni_actors.transport.curve import make_client, make_cluster
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.other_user import AS_ROOT, NOBODY, python
from tests.support.processes import assert_nothing_left, end_all, processes_of
from tests.support.servers import free_port
from tests.support.waiting import until


@pytest.fixture(scope="module")
def pipeline():
    """A pipeline with keys, and their folder. The last test ends it."""
    with tempfile.TemporaryDirectory(prefix="ot-", dir="/tmp") as name:
        folder = Path(name)
        keys = folder / "keys"
        make_cluster(keys)
        data = chain()
        data["stages"][1]["engine"] = {"step_seconds": 0.05}
        ports = [f"--{name}=127.0.0.1:0" for name in ("http", "metrics")]
        try:
            launcher = EchoLauncher(folder, data, "--keys", str(keys), "--listen", "tcp://127.0.0.1:0", *ports)
            yield launcher.wait_ready(), keys
            if launcher.process.poll() is None:
                launcher.end()
            assert_nothing_left(folder)
        finally:
            end_all(folder)


def test_a_pipeline_with_keys_serves_their_holders_and_shows_no_secret(pipeline, capsys):
    launcher, keys = pipeline
    alice, bob = make_client(keys, "alice"), make_client(keys, "bob")

    with OmniClient(launcher.endpoint, keys=alice) as client:
        assert client.generate("hello").text == "hello"
        (keys / "allowed" / "bob.key").unlink()
        for given in (bob, None):
            with OmniClient(launcher.endpoint, keys=given) as stranger, pytest.raises(Unauthorized):
                stranger.describe()
        assert client.generate("still here").text == "still here"

    def health() -> int:  # the HTTP server is a client, too
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status
        return 0

    url = re.findall(r"HTTP on (\S+)", launcher.output)[0]
    until(lambda: health() == 200, 10, "the HTTP server reaches the pipeline")

    said = ""
    for command, first, *others in (
        (ctl.main, launcher.endpoint, "status"),
        (top.main, launcher.endpoint, "--once"),
        (trace.main, "last", "--endpoint", launcher.endpoint),
    ):
        assert command([first, "--keys", str(keys), *others]) == 0
        assert command([first, *others]) == 1
        said += capsys.readouterr().err
    assert said.count("unauthorized") == 3
    assert "Traceback" not in said
    scraped = re.findall(r"metrics on (\S+)", launcher.output)[0]
    with urllib.request.urlopen(scraped, timeout=5) as answer:
        assert b"omni" in answer.read()

    # Processes, logs and descriptions are open to users who must not learn the secrets.
    processes = processes_of(launcher.folder)
    shown = launcher.output + said + repr(launcher.describe_with(keys)) + " ".join(processes.values())
    shown += "".join(Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace") for pid in processes)
    shown += "".join(path.read_text() for path in launcher.folder.rglob("*.log"))
    assert "refused a peer at 127.0.0.1" in shown  # what is searched is what is meant
    assert len(processes) >= 6
    for path in keys.rglob("*.key_secret"):
        secret = path.read_text().partition('secret-key = "')[2].partition('"')[0]
        assert len(secret) == 40
        assert secret not in shown


def test_only_operators_change_what_runs_and_a_locked_out_client_learns_why(pipeline):
    launcher, keys = pipeline
    carol = make_client(keys, "carol")
    with OmniClient(launcher.endpoint, keys=carol) as client:
        assert client.generate("hello").text == "hello"
        assert client.operate(Operation.STATUS).description.healthy, "any client may look"
        for order in ((Operation.DRAIN, "talker"), (Operation.RESTART, "talker"), (Operation.SHUTDOWN,)):
            with pytest.raises(Unauthorized, match=r"carol may not .* --operator NAME"):
                client.operate(*order)
        states = {status.state for status in launcher.describe_with(keys).stages}
        assert states == {"ready"}

        stream = client.submit("x" * 300, modalities=["text"])  # takes longer than it is allowed to
        next(iter(stream))
        (keys / "allowed" / "carol.key").unlink()
        with pytest.raises(Unauthorized, match="not allowed any more"):
            stream.result()
        for question in (client.describe, lambda: client.generate("again"), lambda: client.operate(Operation.STATUS)):
            with pytest.raises(Unauthorized, match="not allowed any more"):
                question()
    until(lambda: not launcher.describe_with(keys).in_flight, 5, "nothing of it is left")
    assert launcher.describe_with(keys).counts["dropped_client_locked_out"] >= 3


def test_an_operator_drains_and_shuts_down(pipeline, capsys):
    launcher, keys = pipeline
    olga = make_client(keys, "olga", operator=True)
    with OmniClient(launcher.endpoint, keys=olga) as operator:
        assert "drains" in operator.operate(Operation.DRAIN, "talker").text
    states = {status.stage: status.state for status in launcher.describe_with(keys).stages}
    assert states["talker"] == "draining"
    assert ctl.main([launcher.endpoint, "--keys", str(olga), "shutdown"]) == 0
    assert capsys.readouterr().out == "The pipeline shuts down.\n"
    assert launcher.wait_end() == 0
    assert "an operator asked for it" in launcher.output


SECRET = "a-secret-that-no-one-else-may-read"

# Tries everything on the paths and processes of its arguments, and prints what was not refused.
ATTACK = """
import json, os, signal, socket, sys
paths, sockets, pids = json.loads(sys.argv[1])
done = []

def attempt(what, action):
    try:
        action()
    except (PermissionError, IsADirectoryError):
        return
    except OSError as error:
        done.append([what, str(error)])
    else:
        done.append([what, "done"])

def connect(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)

for path in paths:
    attempt(f"list {path}", lambda: os.listdir(path))
    attempt(f"read {path}", lambda: os.close(os.open(path, os.O_RDONLY)))
    attempt(f"write {path}", lambda: os.close(os.open(path, os.O_WRONLY)))
    attempt(f"remove {path}", lambda: os.unlink(path))
for path in sockets:
    attempt(f"connect to {path}", lambda: connect(path))
for pid in pids:
    attempt(f"environment of {pid}", lambda: os.close(os.open(f"/proc/{pid}/environ", os.O_RDONLY)))
    attempt(f"memory of {pid}", lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY)))
    attempt(f"files of {pid}", lambda: os.listdir(f"/proc/{pid}/fd"))
    attempt(f"end {pid}", lambda: os.kill(pid, signal.SIGTERM))
print(json.dumps(done))
"""


@AS_ROOT
def test_another_user_reads_reaches_and_ends_nothing(launch, short_path, monkeypatch):
    short_path.chmod(0o755)  # the run directory protects itself
    port = free_port()
    monkeypatch.setenv("OMNI_ACTORS_API_KEY", SECRET)
    launcher = launch(chain(), "--http", f"127.0.0.1:{port}").wait_ready()
    with OmniClient(launcher.endpoint) as client:
        assert client.generate("mine").text == "mine"
    (run,) = (entry.parent for entry in short_path.glob("omni-*/logs"))
    paths = [run, *run.rglob("*")]
    sockets = [path for path in paths if path.is_socket()]
    assert {"client", "control", "results"} < {path.name for path in sockets}
    processes = [psutil.Process(launcher.process.pid), *psutil.Process(launcher.process.pid).children(recursive=True)]
    assert len(processes) >= 7
    tried = json.dumps([[*map(str, paths)], [*map(str, sockets)], [process.pid for process in processes]])
    as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    assert json.loads(subprocess.check_output([python(), "-S", "-c", ATTACK, tried], timeout=240, **as_nobody)) == []
    # What everyone may read: command lines, and names of abstract sockets.
    assert not [process.pid for process in processes if SECRET in " ".join(process.cmdline())]
    own = {connection.laddr for process in processes for connection in process.net_connections("unix")}
    assert not [name for name in own if name.startswith(("@", "\0"))]
    connections = [connection for process in processes for connection in process.net_connections("inet")]
    listening = {tuple(one.laddr) for one in connections if one.status == psutil.CONN_LISTEN}
    assert listening == {("127.0.0.1", port)}
    assert launcher.describe().healthy
