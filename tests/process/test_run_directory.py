"""The run directory of a running pipeline loses files, and then is removed."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from omni_actors.client import OmniClient
from tests.support.builders import chain
from tests.support.waiting import until


def test_removed_sockets_and_logs_come_back_and_a_removed_folder_ends_the_pipeline(launch, short_path):
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
def test_starts_that_fail_leave_nothing(launch, short_path):
    """The fixture looks for processes, sockets and shared memory."""
    junk = str(short_path / "junk.pem")
    Path(junk).write_text("junk")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        failing = [  # arguments, exit code, the words that name what is wrong
            (["--http", "127.0.0.1:0", "--http-certificate", junk, "--http-key", junk], 2, "junk.pem"),
            (["--http", address], 2, address),
            (["--metrics", address], 2, address),
            (["--listen", f"tcp://{address}"], 1, address),
        ]
        folders = [short_path / str(number) for number in range(len(failing))]
        launchers = [
            launch(chain(), "--run-dir", str(folder), *arguments)
            for folder, (arguments, _, _) in zip(folders, failing, strict=True)
        ]
        for launcher, folder, (_, code, words) in zip(launchers, folders, failing, strict=True):
            assert launcher.wait_end(20) == code, launcher.output
            assert words in launcher.output
            assert "Traceback" not in launcher.output
            assert {entry.name for entry in folder.glob("*")} <= {"logs"}
