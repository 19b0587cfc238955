"""Pipelines start, end and die: what users see, and what is left. A coordinator that starts slowly is waited for."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import threading
import time

import psutil
import pytest
import soundfile

from omni_actors.client import AsyncOmniClient, OmniClient
from omni_actors.errors import OmniError, RequestTimeout, StageUnavailable, StartupError
from omni_actors.host.run_directory import RunDirectory
from omni_actors.launcher import children
from omni_actors.launcher import launcher as launcher_module
from omni_actors.launcher.children import CoordinatorChild
from tests.support.builders import chain, pipeline
from tests.support.commands import python
from tests.support.nightly import nightly
from tests.support.processes import assert_nothing_left, processes_of
from tests.support.waiting import PATIENCE, eventually, until


def slow(stage, **options):
    data = chain()
    data["stages"][stage]["engine"] = options
    return data


def titles(folder):
    return {command for command in processes_of(folder).values() if command.startswith("omni:")}


def assert_clean(folder, seconds=1.0):
    assert_nothing_left(folder, seconds)
    assert not [entry for entry in folder.iterdir() if entry.is_dir()], sorted(folder.rglob("*"))


def test_one_prompt_is_answered_on_the_command_line(launch, short_path):
    wav = short_path / "out.wav"
    launcher = launch(chain(), "--prompt", "say it", "--save-audio", str(wav), "--voice", "Ethan")
    assert launcher.wait_end(20) == 0
    assert "say it\n" in launcher.output
    samples, rate = soundfile.read(wav)
    assert (len(samples), rate) == (6 * 480, 24_000)
    assert_clean(short_path)
    launcher = launch(chain(), "--prompt", "x", "--voice", "Bob")
    assert launcher.wait_end(20) == 1
    assert "error (unknown_voice): " in launcher.output
    assert "Chelsie, Ethan" in launcher.output


def test_a_stage_that_fails_at_start(launch):
    launcher = launch(slow(2, fail_start="the weights are made of cheese"))
    assert launcher.wait_end(20) == 1
    output = launcher.output
    assert "error (startup_error): talker/0 died (exit code 1)" in output
    assert "the weights are made of cheese" in output
    assert "Traceback" in output.split("last lines of its log")[1]


def test_a_run_directory_in_use_or_too_long_is_refused(launch, short_path):
    run_dir = short_path / "run"
    first = launch(chain(), "--run-dir", str(run_dir)).wait_ready()
    second = launch(chain(), "--run-dir", str(run_dir))
    third = launch(chain(), "--run-dir", str(short_path / ("x" * 80)))
    assert second.wait_end() == third.wait_end() == 2
    assert f"in use by process {first.process.pid}" in second.output
    assert "too long" in third.output
    assert first.describe().healthy
    assert first.end() == 0
    assert [entry.name for entry in run_dir.iterdir()] == ["logs"]


def test_a_signal_ends_everything_and_answers_every_client(launch, short_path):
    launcher = launch(slow(0, step_seconds=0.01)).wait_ready()
    stages = {"omni:prompt/0", "omni:thinker/0", "omni:talker/0", "omni:code2wav/0"}
    assert titles(short_path) == stages | {"omni:coordinator"}
    with OmniClient(launcher.endpoint) as client:
        running = client.submit("x" * 2000)
        until(lambda: client.describe().in_flight == 1, 5, "admitted")
        on_its_way = client.submit("x" * 2000)
        assert launcher.end(signal.SIGINT) == 0
        for stream in (running, on_its_way):
            with pytest.raises(StageUnavailable, match="shutting down"):
                stream.result()
    assert_clean(short_path)


def test_ctrl_c_for_all_processes_while_they_load_ends_everything(launch, short_path):
    launcher = launch(slow(1, start_seconds=600.0))
    until(lambda: "prompt/0 ready" in launcher.output, 10, "first stage ready")
    os.killpg(launcher.process.pid, signal.SIGINT)
    assert launcher.wait_end(10) == 0
    assert_clean(short_path)


PRELOAD = """
import os, sys; os.environ["PYTHONPATH"] += ":{folder}"
from omni_actors import launch
from omni_actors.launcher import replica_processes as node
node.LIGHT_PRELOAD = node.MODEL_PRELOAD = "strange_preload"
if __name__ == "__main__": sys.exit(launch.main())
"""
BROKEN = """
from omni_actors.engine import platform
platform.preload_modules = lambda: ["json", "a_module_that_is_missing"]
import omni_actors.engine.workers.preload
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)  # with the checkpoint, if no test before it has made one
def test_a_signal_does_not_wait_for_imports_in_the_fork_server_and_one_that_fails_is_named(
    launch, short_path, tiny_checkpoint
):
    """Importing vLLM takes ten seconds and cannot be interrupted."""
    preload, script = short_path / "strange_preload.py", short_path / "preload.py"
    script.write_text(PRELOAD.format(folder=short_path))
    stage = {"name": "prompt", "kind": "prompt", "outputs": ["text"]}
    data = {"name": "p", "model": str(tiny_checkpoint), "stages": [stage]}
    preload.write_text(BROKEN)
    launcher = launch(data, program=[str(script)])
    assert launcher.wait_end(30) == 1
    assert "prompt/0 died (exit code 1)" in launcher.output
    assert "a_module_that_is_missing: ModuleNotFoundError" in launcher.output
    preload.write_text("import time; time.sleep(600)")
    launcher = launch(data, program=[str(script)])
    until(lambda: any("forkserver" in command for command in processes_of(short_path).values()), 20, "fork server")
    assert launcher.end(signal.SIGTERM, 6) == 0
    assert_nothing_left(short_path, 1.0)


@pytest.mark.nightly
def test_a_second_signal_ends_at_once(launch, short_path):
    started = launch(slow(1, start_seconds=600.0))
    launcher = started.process
    until(lambda: len(titles(short_path)) == 5, 10, lambda: f"{processes_of(short_path)} {started.output}")
    for pid, command in processes_of(short_path).items():
        if command.startswith("omni:"):
            psutil.Process(pid).suspend()  # they cannot end in order
    launcher.send_signal(signal.SIGINT)
    time.sleep(launcher_module.SAME_STOP_SECONDS + 0.1)  # signals that are closer together count as one
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert started.wait_end(3) == 128 + signal.SIGINT


@pytest.mark.parametrize("own_folder", [nightly(True), False])
def test_a_killed_launcher_leaves_nothing_and_ends_its_requests(launch, short_path, own_folder):
    run_dir = short_path / "run"
    arguments = ["--run-dir", str(run_dir)] if own_folder else []
    launcher = launch(slow(0, step_seconds=0.01), *arguments).wait_ready()
    with OmniClient(launcher.endpoint) as client:
        stream = client.submit("x" * 1000, modalities=["text"])
        epochs = {status.epoch for status in client.describe().stages}
        launcher.end(signal.SIGKILL)
        with pytest.raises(StageUnavailable, match="shutting down"):  # from the coordinator, before it ends, too
            stream.result()
        if own_folder:  # a supervisor starts the next one at once, while the stages of the first still end
            again = launch(chain(), *arguments).wait_ready()
            with OmniClient(again.endpoint) as other:
                assert other.generate("second life", timeout=10 * PATIENCE).text == "second life"
            assert again.describe().healthy
            assert not {status.epoch for status in again.describe().stages} & epochs
            assert again.end() == 0
        assert_nothing_left(short_path, 5.0)
    left = [str(entry.relative_to(short_path)) for entry in short_path.rglob("*") if entry.is_dir()]
    assert left == (["run", "run/logs"] if own_folder else [])


async def test_no_coordinator_answers(short_path, monkeypatch):
    monkeypatch.setattr("omni_actors.client.async_client.PING_SECONDS", 0.1)
    monkeypatch.setattr("omni_actors.client.async_client.ANSWER_SECONDS", 0.3)
    async with AsyncOmniClient(f"ipc://{short_path}/client") as client:
        with pytest.raises(RequestTimeout, match=r"did not answer within 0\.2 s"):
            await client.describe(timeout=0.2)
        stream = await client.submit("x", modalities=["text"])
        with pytest.raises(RequestTimeout):
            async with asyncio.timeout(5):
                await stream.result()
    with pytest.raises(OmniError, match="is not an endpoint"):
        await AsyncOmniClient("nonsense").__aenter__()


def test_fan_out_and_fan_in(launch):
    data = chain()
    data["stages"][2:] = [
        {"name": "left", "kind": "echo", "inputs": {"from": "thinker"}},
        {"name": "right", "kind": "echo", "inputs": {"from": "thinker"}, "sampling": {"max_tokens": 1}},
        {"name": "join", "kind": "echo", "inputs": {"from": ["right", "left", "prompt"]}, "outputs": ["audio"]},
    ]
    launcher = launch(data).wait_ready()
    with OmniClient(launcher.endpoint) as client:
        for output in (client.generate("abc"), client.generate("abc", modalities=["audio"])):
            levels = (output.audio[::480] * 256).astype(int).tolist()
            assert bytes(levels) == b"a" + b"abc" + b"abc"
            assert set(output.usage) == {"prompt", "thinker", "left", "right", "join"}
        assert set(client.generate("abc", modalities=["text"]).usage) == {"prompt", "thinker"}
    launcher.wait_idle()


EARLY = """
import multiprocessing, signal, time
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["omni_actors.launcher.fork_server"])
child = "import signal, time; signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}); time.sleep(30)"
for _ in range(4):
    process = context.Process(target=exec, args=(child,))
    process.start()
    process.terminate()
    process.join(10)
    print(process.exitcode)
    process.kill()
"""


def test_a_signal_to_a_stage_that_has_just_been_forked_is_not_lost():
    """Before it has set its own handler: the launcher would wait its whole shutdown_timeout in vain."""
    done = python("-c", EARLY, check=True)
    assert done.stdout.split() == ["-15"] * 4


def test_an_http_server_that_is_killed_at_the_end_is_no_secret(launch):
    """Its clients get no answer, and the log says why."""
    launcher = launch({**chain(), "coordinator": {"shutdown_timeout": 1.0}}, "--http", "127.0.0.1:0").wait_ready()
    children = psutil.Process(launcher.process.pid).children
    until(lambda: next((child for child in children() if child.cmdline()[0] == "omni:http"), None)).suspend()
    assert launcher.end(seconds=30) == 0
    assert "the HTTP server did not stop within 1 s; killing it" in launcher.output


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
