"""Pipelines start, end and die: the output that users see, and the files and processes that are left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import soundfile

from omni_actors.client import AsyncOmniClient, OmniClient
from omni_actors.errors import OmniError, RequestTimeout, StageLost, StageUnavailable
from omni_actors.launcher import launcher as launcher_module
from omni_actors.stage.echo import CRASH_TOKEN
from tests.support.builders import chain, write
from tests.support.launcher import EchoLauncher
from tests.support.nightly import nightly
from tests.support.processes import assert_nothing_left, processes_of
from tests.support.waiting import until

Launch = Callable[..., EchoLauncher]


def slow(stage: int, **options: Any) -> dict[str, Any]:
    """The echo chain with options for the engine of one stage."""
    data = chain()
    data["stages"][stage]["engine"] = options
    return data


def without_restarts(data: dict[str, Any]) -> dict[str, Any]:
    for stage in data["stages"]:
        stage["restarts"] = 0
    return data


def titles(folder: Path) -> set[str]:
    return {command for command in processes_of(folder).values() if command.startswith("omni:")}


# -- one prompt -------------------------------------------------------------------------------------------------------


def test_one_prompt_is_answered_on_the_command_line(launch: Launch, short_path: Path) -> None:
    wav = short_path / "out.wav"
    launcher = launch(chain(), "--prompt", "say it", "--save-audio", str(wav), "--voice", "Ethan")
    assert launcher.wait_end(20) == 0
    assert "say it\n" in launcher.output
    samples, rate = soundfile.read(wav)
    assert (len(samples), rate) == (6 * 480, 24_000)
    assert_nothing_left(short_path, 1.0)
    assert not [entry for entry in short_path.iterdir() if entry.is_dir()], sorted(short_path.rglob("*"))


def test_one_prompt_that_fails_names_its_error(launch: Launch) -> None:
    launcher = launch(chain(), "--prompt", "x", "--voice", "Bob")
    assert launcher.wait_end(20) == 1
    assert "error (unknown_voice): " in launcher.output
    assert "Chelsie, Ethan" in launcher.output


# -- start ------------------------------------------------------------------------------------------------------------


def test_a_stage_that_fails_at_start(launch: Launch) -> None:
    launcher = launch(slow(2, fail_start="the weights are made of cheese"))
    assert launcher.wait_end(20) == 1
    output = launcher.output
    assert "error (startup_error): talker/0 died (exit code 1)" in output
    assert "the weights are made of cheese" in output
    assert "last lines of its log" in output
    assert "Traceback" in output.split("last lines of its log")[1]


@pytest.mark.nightly
def test_a_stage_that_is_not_ready_in_time(launch: Launch) -> None:
    """Which one is named of several is decided in the core."""
    data = chain()
    for stage in data["stages"]:
        stage["engine"] = {"start_seconds": 600.0}
    launcher = launch(data, "--startup-timeout", "3")
    assert launcher.wait_end(30) == 1, "before the stages would have been ready"
    assert re.search(r"/0 is not ready in time while (starting process|loading)", launcher.output)


def test_a_wrong_option_of_a_stage_is_named_before_anything_starts(launch: Launch, short_path: Path) -> None:
    launcher = launch(slow(1, step_second=1.0))
    assert launcher.wait_end(20) == 2
    assert "[omni_actors]" not in launcher.output
    assert not [entry for entry in short_path.iterdir() if entry.is_dir()], sorted(short_path.rglob("*"))
    assert "stages.thinker.engine.step_second" in launcher.output
    assert "Did you mean 'step_seconds'" in launcher.output


def test_a_run_directory_in_use_or_too_long_is_refused(launch: Launch, short_path: Path) -> None:
    run_dir = short_path / "run"
    first = launch(chain(), "--run-dir", str(run_dir)).wait_ready()
    second = launch(chain(), "--run-dir", str(run_dir))
    assert second.wait_end() == 2
    assert f"in use by process {first.process.pid}" in second.output
    third = launch(chain(), "--run-dir", str(short_path / ("x" * 80)))
    assert third.wait_end() == 2
    assert "too long" in third.output
    assert first.describe().healthy
    assert first.end() == 0
    assert [entry.name for entry in run_dir.iterdir()] == ["logs"]


def test_check_starts_nothing(launch: Launch, short_path: Path) -> None:
    launcher = launch(chain(), "--check")
    assert launcher.wait_end() == 0
    assert "placement" in launcher.output
    assert "[default]" in launcher.output
    assert not [entry for entry in short_path.iterdir() if entry.is_dir()], sorted(short_path.rglob("*"))


HANDSHAKE = """
import sys
import msgspec, omni_actors, omni_actors.launcher.node_agent, omni_actors.stage.session
from omni_actors import launch
from omni_actors.launcher import replica_processes as node

WHAT = sys.argv.pop()
if WHAT == "node":
    omni_actors.launcher.node_agent.PROTOCOL_VERSION = 77
elif WHAT == "config":
    usual = node.ReplicaProcesses.spec

    def spec(self, *arguments):
        other = msgspec.structs.replace(self._pipeline, name="other")
        return usual(self, *arguments)._replace(pipeline_json=msgspec.json.encode(other))

    node.ReplicaProcesses.spec = spec
else:
    node.LIGHT_PRELOAD = "strange_" + WHAT  # what the stages are forked from

if __name__ == "__main__":
    sys.exit(launch.main())
"""
STRANGE = {
    "package": "import omni_actors.stage.process, omni_actors; omni_actors.__version__ = '9.9.9'",
    "protocol": "import omni_actors.stage.session; omni_actors.stage.session.PROTOCOL_VERSION = 77",
}


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("config", ()),
        nightly("package", ("9.9.9", "0.2.0")),
        nightly("protocol", ("77", "1")),
        nightly("node", ("77", "1", "Node 0")),
    ],
)
def test_a_handshake_mismatch_fails_the_start_and_names_both_values(
    launch: Launch, short_path: Path, what: str, values: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from omni_actors import config

    script = short_path / "handshake.py"
    script.write_text(HANDSHAKE)
    for name, code in STRANGE.items():
        (short_path / f"strange_{name}.py").write_text(code)
    if what == "config":
        pipeline = config.load(write(short_path, chain())).pipeline
        values = (pipeline.digest(), msgspec.structs.replace(pipeline, name="other").digest())
    launcher = launch(chain(), what, program=[str(script)], path=str(short_path))
    assert launcher.wait_end(20) == 1
    assert "error (startup_error): " in launcher.output
    assert all(value in launcher.output for value in values), launcher.output


# -- end --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, nightly(signal.SIGTERM)])
def test_a_signal_ends_everything_and_answers_every_client(
    launch: Launch, short_path: Path, number: signal.Signals
) -> None:
    launcher = launch(slow(0, step_seconds=0.01)).wait_ready()
    stages = {"omni:prompt/0", "omni:thinker/0", "omni:talker/0", "omni:code2wav/0"}
    assert titles(short_path) == stages | {"omni:coordinator"}
    with OmniClient(launcher.endpoint) as client:
        running = client.submit("x" * 2000)
        until(lambda: client.describe().in_flight == 1, 5, "admitted")
        on_its_way = client.submit("x" * 2000)
        assert launcher.end(number, 10) == 0
        for stream in (running, on_its_way):
            with pytest.raises(StageUnavailable, match="shutting down"):
                stream.result()
    assert_nothing_left(short_path, 1.0)
    assert not [entry for entry in short_path.iterdir() if entry.is_dir()], sorted(short_path.rglob("*"))


@pytest.mark.parametrize(
    "moment", [nightly("importing"), nightly("loading"), "loading, and Ctrl-C reaches all processes"]
)
def test_a_signal_while_starting_ends_everything(launch: Launch, short_path: Path, moment: str) -> None:
    launcher = launch(slow(1, start_seconds=600.0))
    until(lambda: "starting prompt/0" in launcher.output, 10, "start")
    if moment != "importing":
        until(lambda: "prompt/0 ready" in launcher.output, 10, "first stage ready")
    if "Ctrl-C" in moment:
        os.killpg(launcher.process.pid, signal.SIGINT)
        assert launcher.wait_end(10) == 0
    else:
        assert launcher.end(signal.SIGTERM, 10) == 0
    assert_nothing_left(short_path, 1.0)
    assert not [entry for entry in short_path.iterdir() if entry.is_dir()], sorted(short_path.rglob("*"))


@pytest.mark.nightly
def test_a_signal_does_not_wait_for_the_fork_servers_imports(launch: Launch, short_path: Path) -> None:
    """Importing vLLM takes ten seconds and cannot be interrupted; the end does not wait for it."""
    (short_path / "slow_preload.py").write_text("import time; time.sleep(600)")
    script = short_path / "slow.py"
    script.write_text(
        f"import os, sys; os.environ['PYTHONPATH'] += {':' + str(short_path)!r}\n"
        "from omni_actors import launch\n"
        "from omni_actors.launcher import replica_processes as node\n"
        "node.LIGHT_PRELOAD = 'slow_preload'\n"
        "if __name__ == '__main__': sys.exit(launch.main())\n"
    )
    launcher = launch(chain(), program=[str(script)])
    until(lambda: "starting prompt/0" in launcher.output, 10, "start")
    until(lambda: any("forkserver" in command for command in processes_of(short_path).values()), 10, "fork server")
    assert launcher.end(signal.SIGTERM, 6) == 0
    assert_nothing_left(short_path, 1.0)
    assert not [entry for entry in short_path.iterdir() if entry.is_dir() and entry.name.startswith("omni-")]


@pytest.mark.nightly
def test_a_signal_after_the_end_changes_no_exit_code(launch: Launch, short_path: Path) -> None:
    """The signal comes when only the interpreter is left to end: another node has ended and the script stops all."""
    script = short_path / "late.py"
    script.write_text(
        "import os, signal, sys\n"
        "from omni_actors import launch\n"
        "if __name__ == '__main__':\n"
        "    code = launch.main()\n"
        "    for number in (signal.SIGTERM, signal.SIGINT): os.kill(os.getpid(), number)\n"
        "    sys.exit(code)\n"
    )
    launcher = launch(chain(), "--prompt", "a", program=[str(script)])
    assert launcher.wait_end(20) == 0, launcher.output


@pytest.mark.nightly
def test_an_import_that_fails_in_the_fork_server_is_named(
    launch: Launch, short_path: Path, tiny_checkpoint: Path
) -> None:
    (short_path / "broken_preload.py").write_text(
        "from omni_actors.engine import platform\n"
        "platform.preload_modules = lambda: ['json', 'a_module_that_is_missing']\n"
        "import omni_actors.engine.preload\n"
    )
    script = short_path / "broken.py"
    script.write_text(
        f"import os, sys; os.environ['PYTHONPATH'] += {':' + str(short_path)!r}\n"
        "from omni_actors import launch\n"
        "from omni_actors.launcher import replica_processes as node\n"
        "node.MODEL_PRELOAD = 'broken_preload'\n"
        "if __name__ == '__main__': sys.exit(launch.main())\n"
    )
    data = {"name": "p", "model": str(tiny_checkpoint), "stages": [{"name": "prompt", "kind": "prompt"}]}
    data["stages"][0]["outputs"] = ["text"]
    launcher = launch(data, program=[str(script)])
    assert launcher.wait_end(30) == 1
    assert "prompt/0 died (exit code 1)" in launcher.output
    assert "a_module_that_is_missing: ModuleNotFoundError" in launcher.output


@pytest.mark.nightly
def test_an_engine_that_fails_to_end_keeps_nothing_from_being_closed(launch: Launch, short_path: Path) -> None:
    launcher = launch(slow(2, fail_shutdown="the engine does not want to end"), "--run-dir", str(short_path / "run"))
    launcher.wait_ready()
    assert launcher.end() == 0
    assert "did not stop" not in launcher.output
    log = (short_path / "run" / "logs" / "talker-0.log").read_text()
    assert "the engine does not want to end" in log
    assert "the engine failed in its shutdown" in log
    assert log.rstrip().endswith("stopped"), "in order, and not because its time was up"
    assert_nothing_left(short_path, 1.0)


@pytest.mark.nightly
def test_a_second_signal_ends_at_once(launch: Launch, short_path: Path) -> None:
    started = launch(slow(1, start_seconds=600.0))
    launcher = started.process
    until(lambda: len(titles(short_path)) == 5, 10, lambda: f"{processes_of(short_path)} {started.output}")
    for pid, command in processes_of(short_path).items():
        if command.startswith("omni:"):
            psutil.Process(pid).suspend()  # they cannot end in order
    launcher.send_signal(signal.SIGINT)
    time.sleep(launcher_module.SAME_STOP_SECONDS + 0.1)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(3) == 128 + signal.SIGINT


@pytest.mark.parametrize("own_folder", [nightly(True), False])
def test_a_killed_launcher_leaves_nothing(launch: Launch, short_path: Path, own_folder: bool) -> None:
    run_dir = short_path / "run"
    arguments = ["--run-dir", str(run_dir)] if own_folder else []
    launcher = launch(slow(0, step_seconds=0.01), *arguments).wait_ready()
    with OmniClient(launcher.endpoint) as client:
        client.submit("x" * 1000, modalities=["text"])
        epochs = {status.epoch for status in client.describe().stages}
        launcher.end(signal.SIGKILL)
        if own_folder:  # a supervisor starts the next one at once, while the stages of the first still end
            again = launch(chain(), *arguments).wait_ready()
            with OmniClient(again.endpoint) as other:
                assert other.generate("second life", timeout=10).text == "second life"
            assert again.describe().healthy
            assert not {status.epoch for status in again.describe().stages} & epochs
            assert again.end() == 0
        assert_nothing_left(short_path, 5.0)
    left = [str(entry.relative_to(short_path)) for entry in short_path.rglob("*") if entry.is_dir()]
    assert left == (["run", "run/logs"] if own_folder else [])


@pytest.mark.nightly
def test_a_launcher_killed_while_a_stage_loads_leaves_nothing(launch: Launch, short_path: Path) -> None:
    launcher = launch(slow(1, start_seconds=600.0))
    until(lambda: "code2wav/0 ready" in launcher.output, 10, "the others are ready")
    launcher.end(signal.SIGKILL)
    assert_nothing_left(short_path, 5.0)
    assert not [entry for entry in short_path.iterdir() if entry.is_dir()], sorted(short_path.rglob("*"))


# -- stages that die --------------------------------------------------------------------------------------------------


def test_a_pipeline_goes_on_without_a_dead_stage(launch: Launch) -> None:
    data = without_restarts(chain())
    data["stages"][0]["engine"] = {"step_seconds": 0.01}
    launcher = launch(data).wait_ready()
    with OmniClient(launcher.endpoint) as client:
        held, text_only = client.submit("x" * 100), client.submit("y" * 100, modalities=["text"])
        psutil.Process(launcher.pid_of("code2wav")).kill()
        with pytest.raises(StageLost, match="killed by signal 9") as caught:
            held.result()
        assert (caught.value.stage, caught.value.retryable) == ("code2wav", True)
        assert text_only.result().text == "y" * 100
        description = client.describe()
        assert not description.healthy
        assert {s.stage: s.state for s in description.stages}["code2wav"] == "dead"
        assert "degraded: code2wav/0 died" in launcher.output
        with pytest.raises(StageUnavailable, match="'code2wav'"):
            client.generate("x")
        assert client.generate("still", modalities=["text"]).text == "still"
        launcher.wait_idle()
        with pytest.raises(StageLost) as caught:  # an engine that is lost ends its process
            client.generate({"prompt_token_ids": [CRASH_TOKEN]}, modalities=["text"])
        assert caught.value.stage == "prompt"
        with pytest.raises(StageUnavailable, match="'prompt'"):
            client.generate("x", modalities=["text"])
        assert (
            "A test asked this stage to end."
            in until(lambda: launcher.output.split("degraded: prompt/0")[1:], 5, "the second report")[0]
        )


@pytest.mark.nightly
def test_healthy_replica_serves_on(launch: Launch) -> None:
    data = without_restarts(chain())
    data["stages"][1]["replicas"] = 2
    launcher = launch(data).wait_ready()
    with OmniClient(launcher.endpoint) as client:
        thinkers = [status for status in client.describe().stages if status.stage == "thinker"]
        assert [status.replica for status in thinkers] == [0, 1]
        psutil.Process(thinkers[0].pid).kill()
        until(lambda: not client.describe().healthy, 5, "noticed")
        for text in ("a", "b", "c"):
            assert client.generate(text).text == text


# -- clients without a coordinator ------------------------------------------------------------------------------------


async def test_no_coordinator_answers(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.nightly
async def test_launcher_killed_while_a_request_runs(launch: Launch) -> None:
    launcher = launch(slow(1, step_seconds=0.01)).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client:
        stream = await client.submit("x" * 1000)
        await anext(stream)
        launcher.end(signal.SIGKILL)
        with pytest.raises(StageUnavailable, match="shutting down"):  # from the coordinator, before it ends, too
            async with asyncio.timeout(2):
                await stream.result()


# -- graphs -----------------------------------------------------------------------------------------------------------


def test_fan_out_and_fan_in(launch: Launch) -> None:
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


def test_a_signal_to_a_stage_that_has_just_been_forked_is_not_lost() -> None:
    """Before it has set its own handler: the launcher would wait its whole shutdown_timeout in vain."""
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["-15"] * 4


def test_the_http_server_has_the_shutdown_timeout_to_end(launch: Launch) -> None:
    """It may have many clients to tell. This one is stopped for a while."""
    launcher = launch({**chain(), "coordinator": {"shutdown_timeout": 60.0}}, "--http", "127.0.0.1:0").wait_ready()
    children = psutil.Process(launcher.process.pid).children
    server = until(lambda: next((child for child in children() if child.cmdline()[0] == "omni:http"), None))
    server.suspend()
    launcher.process.terminate()

    def asked() -> bool:
        pending = re.search(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{server.pid}/status").read_text(), re.MULTILINE)
        return pending is not None and bool(int(pending[1], 16) >> (signal.SIGTERM - 1) & 1)

    until(asked, 10, "the launcher to ask the server to end")
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.process.wait(6)
    server.resume()
    assert launcher.wait_end(30) == 0
