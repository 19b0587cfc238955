"""The disk of the run directory and of a recording fills up while requests stream."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from omni_actors.client import OmniClient
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.waiting import until


@pytest.fixture
def small_disk(short_path: Path) -> Iterator[Path]:
    """A folder with a file system of its own, of 2 MiB."""
    folder = short_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount file systems")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    assert not os.statvfs(path.parent).f_bavail


def test_a_full_disk_ends_recordings_and_nothing_else(small_disk: Path, launch: Callable[..., EchoLauncher]) -> None:
    run, records = small_disk / "run", small_disk / "records"
    data = chain()
    data["stages"][0]["engine"] = {"step_seconds": 0.005}
    launcher = launch(data, "--run-dir", str(run), "--record", str(records)).wait_ready()
    with OmniClient(launcher.endpoint) as client:
        running = client.submit("x" * 100)
        until(lambda: client.describe().in_flight == 1, 5, "admitted")
        fill(small_disk / "fill")
        assert running.result().text == "x" * 100
        first = launcher.pid_of("talker")
        psutil.Process(first).kill()
        until(lambda: "starting talker/0 again" in launcher.output, 5, "restart")
        with OmniClient(launcher.endpoint) as new:
            assert new.generate("new").text == "new"
        (small_disk / "fill").unlink()
        assert client.generate("after").text == "after"
        assert client.describe().healthy
    assert launcher.end() == 0
    logs = "".join(path.read_text() for path in (run / "logs").iterdir())
    assert "the recording ends here" in launcher.output + logs
    assert "Traceback" not in launcher.output + logs


FULL_OUTPUT = """
import os, sys
from omni_actors import launch

def redirect(path):
    for stream in (1, 2):
        os.dup2(os.open(path, os.O_WRONLY), stream)

if __name__ == "__main__":
    redirect("/dev/full")
    code = launch.main()
    redirect("/dev/null")  # the interpreter's own flush would fail, and change the code
    sys.exit(code)
"""


def test_a_launcher_whose_output_cannot_be_written_serves_and_ends_in_order(
    short_path: Path, launch: Callable[..., EchoLauncher]
) -> None:
    (short_path / "full.py").write_text(FULL_OUTPUT)
    run = short_path / "run"
    launcher = launch(chain(), "--run-dir", str(run), program=[str(short_path / "full.py")])

    def listens() -> bool:
        assert launcher.process.poll() is None
        return (run / "client").is_socket()

    until(listens, 20, "the coordinator")
    with OmniClient(f"ipc://{run}/client") as client:
        until(lambda: client.describe().healthy, 20, "ready")
        psutil.Process(next(status.pid for status in client.describe().stages if status.stage == "talker")).kill()
        assert client.generate("unheard").text == "unheard"
    assert launcher.end() == 0
