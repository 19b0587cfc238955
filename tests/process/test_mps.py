"""The launcher starts MPS where replicas share a GPU, and leaves none behind. NVIDIA's programs are stand-ins."""

from __future__ import annotations

import os
import re
import signal
import stat
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_actors.client import OmniClient
from omni_actors.host.run_directory import RunDirectory
from omni_actors.launcher import mps
from tests.support.builders import chain, load
from tests.support.launcher import EchoLauncher
from tests.support.mps import MpsHost, pids
from tests.support.waiting import until

END_SECONDS = 15.0


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "OMNI_ACTORS_MPS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMNI_ACTORS_ALLOW_IMPORTS", "tests.support")


def sharing() -> dict[str, Any]:
    data = chain()
    for stage in data["stages"][1:]:
        stage.update(kind="custom", engine_class="tests.support.mps.DeviceStage", devices=[0])
    return data


@pytest.fixture
def launch_here(launch, short_path, monkeypatch):
    """Starts launchers on a host with two GPUs; `kind` says how MPS works there."""

    def start(*arguments: str, kind: str = "", data: dict[str, Any] | None = None) -> EchoLauncher:
        host = MpsHost(short_path, kind)
        monkeypatch.setenv("PATH", host.path)
        run = ("--run-dir", str(short_path / "run"))
        return launch(data or sharing(), *run, *arguments, program=[str(host.script)])

    return start


def log_of(folder: Path, name: str) -> str:
    return (folder / "run" / "logs" / f"{name}.log").read_text()


def seen(folder: Path, stage: str) -> list[str]:
    """The GPUs and the pipe directory that a stage found in its environment."""
    found = re.search(r"device stage sees (\S+) (\S+)", log_of(folder, f"{stage}-0"))
    assert found is not None, log_of(folder, f"{stage}-0")
    return list(found.groups())


def test_stages_that_share_a_gpu_run_under_a_private_daemon(launch_here, short_path):
    data = sharing()
    data["stages"][3]["devices"] = [1]
    launcher = launch_here(data=data).wait_ready()
    assert "MPS started (GPU 0: thinker/0, talker/0)" in launcher.output
    pipes = short_path / "run" / f"mps-{launcher.process.pid}"
    assert seen(short_path, "thinker") == seen(short_path, "talker") == ["GPU-0", str(pipes)]
    assert seen(short_path, "code2wav") == ["1", "None"], "it has a GPU to itself"
    assert stat.S_IMODE(pipes.stat().st_mode) == 0o700
    daemon_log = log_of(short_path, "mps")
    assert "with GPUs GPU-0\n" in daemon_log
    daemon, server = pids(daemon_log)
    assert all(map(psutil.pid_exists, (daemon, server)))
    with OmniClient(launcher.endpoint) as client:
        assert client.generate("abc").text == "abc"
    assert launcher.end() == 0
    assert not any(map(psutil.pid_exists, (daemon, server)))
    assert [entry.name for entry in (short_path / "run").iterdir()] == ["logs"]
    (ended,) = re.findall(r"ended at (\S+)", log_of(short_path, "thinker-0"))
    (quits, *_) = re.findall(r"\[at (\S+)\] Cmd:quit", log_of(short_path, "mps"))
    assert float(ended) < float(quits), "clients end before the daemon"


def test_a_killed_launcher_leaves_no_daemon(launch_here, short_path):
    launcher = launch_here(kind="stuck").wait_ready()
    processes = pids(log_of(short_path, "mps"))
    assert len(processes) == 2
    launcher.end(signal.SIGKILL)
    until(lambda: not any(map(psutil.pid_exists, processes)), END_SECONDS, "daemon and server are gone")
    until(lambda: not list((short_path / "run").glob("mps-*")), END_SECONDS, "the pipes are gone")


def test_a_daemon_without_its_guardian_ends_and_requests_go_on(launch_here, short_path):
    launcher = launch_here().wait_ready()
    processes = pids(log_of(short_path, "mps"))
    children = psutil.Process(launcher.process.pid).children()
    next(child for child in children if "omni_actors.launcher.mps_guardian" in child.cmdline()).kill()
    until(lambda: "the MPS daemon has ended (guardian: killed by signal 9)" in launcher.output, 5, "said so")
    until(lambda: not psutil.pid_exists(processes[0]), END_SECONDS, "the daemon is gone")
    psutil.Process(launcher.pid_of("thinker")).kill()  # as a client's process ends with its daemon
    with OmniClient(launcher.endpoint) as client:
        assert client.generate("abc").text == "abc"
    assert launcher.end() == 0
    until(lambda: not any(map(psutil.pid_exists, processes)), END_SECONDS, "no server outlives the pipeline")
    assert not list((short_path / "run").glob("mps-*"))


@pytest.mark.nightly
def test_the_pipeline_runs_without_mps_where_it_is_refused(launch_here, short_path):
    launcher = launch_here(kind="no server").wait_ready()
    refused = "MPS refused, continuing without: its server did not start: out of memory; stages take turns"
    assert refused in launcher.output
    assert seen(short_path, "thinker") == seen(short_path, "code2wav") == ["0", "None"]
    until(lambda: not any(map(psutil.pid_exists, pids(log_of(short_path, "mps")))), END_SECONDS, "no daemon is left")


@pytest.mark.nightly
def test_a_daemon_that_runs_already_is_used_and_left_alone(launch_here, short_path, monkeypatch):
    pipes, other = short_path / "theirs", short_path / "other"
    other.mkdir()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
    with MpsHost(other).daemon(pipes) as daemon:
        until((pipes / "control").exists, 20, "their daemon")
        launcher = launch_here().wait_ready()
        assert f"MPS: using the daemon at {pipes} (GPU 0: thinker/0, talker/0, code2wav/0)" in launcher.output
        assert seen(short_path, "thinker") == ["0", str(pipes)]
        assert launcher.end() == 0
        assert daemon.poll() is None
        assert mps.answers(str(pipes))


@pytest.mark.parametrize(
    ("kind", "environment", "reason"),
    [
        ("no daemon", {}, r"the daemon did not start: An instance of this daemon is already running"),
        ("", {"CUDA_VISIBLE_DEVICES": "7"}, "nvidia-smi names no GPU 7"),
        (None, {}, "nvidia-cuda-mps-control is not in "),
    ],
)
async def test_a_refusal_names_its_reason(short_path, kind, environment, reason, monkeypatch):
    host = MpsHost(short_path, kind or "")
    monkeypatch.setenv("PATH", host.path if kind is not None else os.defpath)
    monkeypatch.setattr(mps, "CONTROL_FOLDERS", "")
    monkeypatch.setattr(mps, "USUAL_PIPES", str(short_path / "none"))
    monkeypatch.setattr(mps, "host_devices", lambda: 1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    pipeline = load(short_path, sharing(), devices=1).pipeline
    run = RunDirectory(str(short_path / "run"))
    said: list[str] = []
    child = mps.MpsChild(pipeline, run, said.append)
    try:
        await child.start()
        assert re.search(f"^MPS refused, continuing without: {reason}.*; stages take turns", "\n".join(said), re.DOTALL)
        assert child.clients == mps.NO_MPS
    finally:
        await child.stop()
        run.close()
    assert not list(run.path.glob("mps-*"))
