"""Nothing that the launcher prints can be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from omni_actors.client import OmniClient
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.waiting import until

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


@pytest.mark.nightly
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
