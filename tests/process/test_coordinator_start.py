"""A coordinator that starts slowly is waited for; one that is held is given up, with what is known of it."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import threading

import psutil
import pytest

from omni_actors.errors import StartupError
from omni_actors.host.run_directory import RunDirectory
from omni_actors.launcher import children
from omni_actors.launcher.children import CoordinatorChild
from tests.support.builders import pipeline
from tests.support.nightly import nightly
from tests.support.waiting import eventually, until

IDLE_SECONDS = 2.0
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
BUSY = "while time.process_time() < {}: pass"


@pytest.fixture
def child(monkeypatch, short_path):
    """Makes a coordinator's owner. The process executes a statement before anything else."""
    monkeypatch.setattr(children, "IDLE_SECONDS", IDLE_SECONDS)
    directory = RunDirectory(str(short_path / "run"))

    def make(statement: str) -> CoordinatorChild:
        (short_path / "sitecustomize.py").write_text(f"import os, signal, time\n{statement}\n")
        monkeypatch.setenv("PYTHONPATH", f"{short_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        endpoints = (directory.endpoint("control"), directory.endpoint("results"))
        return CoordinatorChild(pipeline(), directory, *endpoints, on_end=lambda _: None)

    yield make
    directory.close()


def failure_of(child: CoordinatorChild) -> StartupError:
    """The error of a start, without a traceback that would keep alive what it came from."""
    with pytest.raises(StartupError) as caught:
        asyncio.run(child.start())
    return caught.value.with_traceback(None)


@pytest.mark.parametrize(("statement", "state"), [(STOPPED, "stopped"), nightly(BUSY.format("1e9"), "running")])
def test_a_coordinator_that_does_not_listen_is_ended_with_what_is_known_of_it(child, monkeypatch, statement, state):
    monkeypatch.setattr(children, "START_SECONDS", 2 * IDLE_SECONDS)
    before, threads = psutil.Process().children(), threading.active_count()
    error = failure_of(child(statement))
    until(lambda: threading.active_count() == threads, what="asyncio's thread that waits for the process")
    gc.collect()  # of what asyncio complains when it is destroyed, pytest makes an error
    assert psutil.Process().children() == before
    assert re.fullmatch(
        rf"The coordinator did not listen within \d+ s\. Its process \({state}\) has used \d+\.\d s of CPU, of them "
        r"\d+\.\d s in the last 2 s\. The load of this machine is \d+\.\d, for \d+ cores?\.",
        error.message,
    )
    assert "start again with less beside it" in str(error)


async def test_a_coordinator_that_computes_is_waited_for(child):
    slow = child(BUSY.format(1.5 * IDLE_SECONDS))  # the deadline has passed at least once before it listens
    before = psutil.Process().children()
    starting = asyncio.create_task(slow.start())
    await eventually(lambda: psutil.Process().children() != before, what="the process")
    slow.kill_if_silent(60.0)  # as the node agent asks for while it hears nothing
    await starting
    assert slow.client_endpoint.startswith("ipc://")
    await slow.stop()


async def test_a_silent_coordinator_is_killed_unless_it_computes(child, monkeypatch):
    monkeypatch.setattr(children, "SILENT_SECONDS", 0.0)
    owner = child("signal.signal(signal.SIGUSR1, lambda *_: exec('while True: pass'))")
    before = psutil.Process().children()
    await owner.start()
    (coordinator,) = set(psutil.Process().children()) - set(before)
    coordinator.send_signal(signal.SIGUSR1)  # computes from now on, and hears nothing
    for _ in range(3):
        used = coordinator.cpu_times().user
        await eventually(lambda used=used: coordinator.cpu_times().user > used + 0.1, what="the coordinator computes")
        owner.kill_if_silent(6.0)
        assert coordinator.status() != psutil.STATUS_ZOMBIE
    coordinator.suspend()
    await eventually(lambda: coordinator.status() == psutil.STATUS_STOPPED)
    owner.kill_if_silent(7.0)  # sees what it has used until now
    owner.kill_if_silent(8.0)
    await eventually(lambda: not coordinator.is_running() or coordinator.status() == psutil.STATUS_ZOMBIE)
    await owner.stop()
