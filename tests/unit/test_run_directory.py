"""What the owner of a run directory does when others remove it or its files, and whose folders it refuses."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from omni_actors.errors import ConfigError
from omni_actors.host.run_directory import RunDirectory, clear_abandoned, running
from tests.support.other_user import AS_ROOT, NOBODY


@pytest.fixture
def run(short_path: Path) -> Iterator[RunDirectory]:
    opened = RunDirectory(str(short_path / "run"))
    yield opened
    opened.close()


def leave_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def test_temporary_folder_is_private_and_removed() -> None:
    run = RunDirectory()
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert run.temporary
    leave_socket(run.path / "inbox")
    run.close()
    assert not run.path.exists()
    run.close()


def test_given_folder_is_swept_locked_and_kept(short_path: Path) -> None:
    folder = short_path / "run"
    folder.mkdir(mode=0o755)
    leave_socket(folder / "client")
    (folder / "note").write_text("mine")
    run = RunDirectory(str(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not (folder / "client").exists()
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        RunDirectory(str(folder))
    leave_socket(folder / "inbox")
    run.close()
    assert sorted(entry.name for entry in folder.iterdir()) == ["logs", "note"]
    RunDirectory(str(folder)).close()


@pytest.mark.parametrize("temporary", [True, False])
def test_an_abandoned_folder_is_cleared_but_not_one_in_use(short_path: Path, temporary: bool) -> None:
    folder = short_path / "run"
    hold = (
        "import sys, time; from omni_actors.host.run_directory import RunDirectory;"
        "run = RunDirectory(sys.argv[1]); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(folder)], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout.readline() == b"held\n"
        leave_socket(folder / "client")
        clear_abandoned(folder, temporary)
        assert (folder / "client").exists(), "its launcher is running"
        launcher.kill()
    clear_abandoned(folder, temporary)
    assert folder.exists() is not temporary
    if not temporary:
        assert [entry.name for entry in folder.iterdir()] == ["logs"]
    clear_abandoned(folder, temporary)


def test_a_folder_that_others_made_in_its_place_is_not_taken_for_ours_and_stays(short_path: Path) -> None:
    run = RunDirectory(str(short_path / "run"))
    run.temporary = True
    run.path.rename(short_path / "moved")
    run.path.mkdir()
    (run.path / "note").write_text("mine")
    assert "was removed" in run.look()
    run.close()
    assert (run.path / "note").exists()


def test_a_removed_lock_is_taken_again_unless_others_took_it_meanwhile(run: RunDirectory) -> None:
    (run.path / "lock").unlink()
    assert run.look() == ""
    assert (run.path / "lock").read_text() == str(os.getpid())
    with pytest.raises(ConfigError, match="in use"):
        RunDirectory(str(run.path))
    (run.path / "lock").unlink()
    other = RunDirectory(str(run.path))
    assert run.look() == f"Another process has taken the run directory {run.path}."
    other.close()


def test_the_loss_of_the_fork_servers_socket_is_noticed(run: RunDirectory) -> None:
    folder = run.path / "pymp-x"
    folder.mkdir()
    (folder / "listener-y").touch()
    assert run.look() == ""
    (folder / "listener-y").unlink()
    assert "no stage can be restarted" in run.look()


def test_files_are_touched_so_that_no_cleaner_finds_them_old(run: RunDirectory) -> None:
    (run.path / "dangling").symlink_to("nowhere")
    paths = [run.path, *run.path.rglob("*")]
    for path in paths:
        os.utime(path, (0, 0), follow_symlinks=False)
    assert run.look() == ""
    assert [path for path in paths if not path.lstat().st_mtime or not path.lstat().st_atime] == []


def test_a_cleaner_that_honours_locks_leaves_the_folder_alone(run: RunDirectory) -> None:
    """What systemd-tmpfiles does before it descends into a folder."""
    run.look()
    script = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    cleaner = [sys.executable, "-c", script, str(run.path)]
    assert b"BlockingIOError" in subprocess.run(cleaner, capture_output=True, check=False).stderr


def test_a_cleaner_at_work_does_not_disturb(run: RunDirectory) -> None:
    folder = os.open(run.path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    assert run.look() == ""
    os.close(folder)


@AS_ROOT
@pytest.mark.parametrize("link", [False, True])
def test_a_folder_or_link_of_another_user_is_refused_and_left_as_it_is(short_path: Path, link: bool) -> None:
    folder = short_path / "run"
    if link:
        (short_path / "mine").mkdir(mode=0o755)
        folder.symlink_to(short_path / "mine")
    else:
        folder.mkdir(mode=0o755)
    os.chown(folder, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}, and this process is of user 0"):
        RunDirectory(str(folder))
    assert not list(folder.iterdir())
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_stage_that_ends_after_its_launcher_removes_its_socket_and_keeps_the_logs(short_path: Path) -> None:
    """A launcher that is stopped while it starts a stage may end before that stage has bound its socket."""
    run = RunDirectory(str(short_path / "run"))
    run.log_file("prompt/0").write_text("why it failed")
    run.close()
    leave_socket(run.path / "prompt-0-7")
    clear_abandoned(run.path, temporary=True)
    assert [entry.name for entry in run.path.iterdir()] == ["logs"]
    assert run.log_file("prompt/0").read_text() == "why it failed"


def test_stages_of_a_killed_launcher_that_end_together_leave_nothing(short_path: Path) -> None:
    for number in range(50):
        folder = short_path / f"run{number}"
        (folder / "logs").mkdir(parents=True)
        for stage in range(5):
            (folder / "logs" / f"{stage}.log").touch()
        (folder / "lock").write_text("1")  # its owner did not come to remove it
        with ThreadPoolExecutor(4) as stages:
            for _ in range(4):
                stages.submit(clear_abandoned, folder, temporary=True)
    assert not list(short_path.iterdir())


def test_running_pipelines_are_listed_until_they_end_in_whatever_way(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    first, second, third = (RunDirectory(str(short_path / name)) for name in ("first", "second", "third"))
    for directory in (first, second, third):
        directory.announce(directory.path.name, f"ipc://{directory.path}/client", None)
    assert [pipeline.name for pipeline in running()] == ["first", "second", "third"]
    (third.path / "pipeline.json").write_bytes(
        msgspec.json.encode({**msgspec.json.decode((third.path / "pipeline.json").read_bytes()), "pid": 1 << 30})
    )
    assert [pipeline.name for pipeline in running()] == ["first", "second"]
    shutil.rmtree(second.path)
    second.close()
    assert [pipeline.endpoint for pipeline in running()] == [f"ipc://{short_path}/first/client"]
    first.close()
    assert running() == []
    third.close()
    assert sorted(entry.name for entry in short_path.iterdir()) == ["first", "third"], "no folder of links is left"
    assert {entry.name for entry in first.path.iterdir()} == {"logs"}


def test_a_folder_of_links_in_which_others_may_write_is_not_used(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    folder = short_path / f"omni-actors-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    directory = RunDirectory(str(short_path / "run"))
    directory.announce("mine", "ipc:///x", None)
    assert "commands have to be given the endpoint" in caplog.text
    (folder / "1-theirs").symlink_to(short_path / "run")
    assert running() == []
    directory.close()
