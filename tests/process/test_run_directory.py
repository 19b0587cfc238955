"""The run directory of a running pipeline loses files, and then is removed."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_actors.client import OmniClient
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.waiting import until


def test_removed_sockets_and_logs_come_back_and_a_removed_folder_ends_the_pipeline(
    launch: Callable[..., EchoLauncher], short_path: Path
) -> None:
    run = short_path / "run"
    launcher = launch(chain() | {"coordinator": {"heartbeat_interval": 0.1}}, "--run-dir", str(run)).wait_ready()
    with OmniClient(launcher.endpoint) as connected:
        assert connected.generate("before").text == "before"
        sockets = [entry for entry in run.iterdir() if entry.is_socket()]
        assert {"client", "control", "results"} < {entry.name for entry in sockets}
        for entry in sockets:
            entry.unlink()
        until(lambda: all(entry.is_socket() for entry in sockets), 5, "sockets")
        with OmniClient(launcher.endpoint) as new:
            assert new.generate("new").text == "new"
        log = run / "logs" / "talker-0.log"
        log.unlink()
        next(entry for entry in sockets if entry.name.startswith("talker-0-")).unlink()
        until(lambda: log.exists() and "was removed; bound it again" in log.read_text(), 5, "a log")
        assert connected.generate("connected").text == "connected"
        shutil.rmtree(run)
        assert launcher.wait_end() == 1
    assert f"error (startup_error): The run directory {run} was removed while the pipeline ran." in launcher.output
    assert "Traceback" not in launcher.output
    assert not run.exists()


@pytest.mark.nightly
def test_starts_that_fail_leave_nothing(launch: Callable[..., EchoLauncher], short_path: Path) -> None:
    """The fixture looks for processes, sockets and shared memory."""
    (short_path / "junk.pem").write_text("junk")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        certificate = ["--http-certificate", str(short_path / "junk.pem"), "--http-key", str(short_path / "junk.pem")]
        failing = {  # what is wrong -> arguments, exit code, the words that name it
            "certificate": (["--http", "127.0.0.1:0", *certificate], 2, "junk.pem"),
            "http": (["--http", address], 2, address),
            "metrics": (["--metrics", address], 2, address),
            "listen": (["--listen", f"tcp://{address}"], 1, address),
        }
        launchers = {
            name: launch(chain(), "--run-dir", str(short_path / name), *arguments)
            for name, (arguments, _, _) in failing.items()
        }
        for name, (_, code, words) in failing.items():
            assert launchers[name].wait_end(20) == code, launchers[name].output
            assert words in launchers[name].output
            assert "Traceback" not in launchers[name].output
            assert {entry.name for entry in (short_path / name).glob("*")} <= {"logs"}
