"""What another user of the host can do with a running pipeline: nothing."""

from __future__ import annotations

import json
import subprocess

import psutil

from omni_actors.client import OmniClient
from tests.support.builders import chain
from tests.support.other_user import AS_ROOT, NOBODY, python
from tests.support.servers import free_port

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
