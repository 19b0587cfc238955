"""Operators look at a running pipeline, drain, restart and stop it."""

from __future__ import annotations

import asyncio
import io
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from omni_actors.cli import ctl as ctl_command
from omni_actors.client import AsyncOmniClient
from omni_actors.errors import StageUnavailable
from tests.support.launcher import EchoLauncher
from tests.support.load import Load, ask_and_check, disturbed_chain, replicas, text_of, until_busy, until_in_flight
from tests.support.waiting import eventually


def ctl(launcher: EchoLauncher, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What `omni-actors ctl` prints and its exit code, without a process of its own."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = ctl_command.main([launcher.endpoint, *arguments])
        except SystemExit as end:  # a wrong usage
            code = int(str(end.code))
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@pytest.fixture
def launcher(disturbed):
    """A pipeline without losses."""
    yield disturbed
    assert "died" not in disturbed.output


async def test_status_shows_stages_and_requests(launcher):
    async with AsyncOmniClient(launcher.endpoint) as client:
        stream = await client.submit("x" * 4000, request_id="mine")
        await anext(stream)
        done = await asyncio.to_thread(ctl, launcher, "status")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0].startswith("test: healthy, 1 of 256 requests in flight, 0 queued")
        assert "talker/0: ready, epoch" in done.stdout
        assert "0 restarts" in done.stdout
        (line,) = [line for line in lines if "request mine" in line]
        assert "running, attempt 0, prompt/0 -> thinker/0 -> talker/0 -> code2wav/0" in line
        await stream.abort()


async def test_a_rolling_restart_fails_no_request(launcher):
    async with AsyncOmniClient(launcher.endpoint) as client, AsyncOmniClient(launcher.endpoint) as other:
        before = await replicas(other)
        restarted = asyncio.Event()

        async def ask() -> int:
            """Keep asking for as long as the restarts take; the loads that were answered."""
            loads = 0
            while not restarted.is_set():
                await Load(client, total=48).run()
                loads += 1
            return loads

        asking = asyncio.create_task(ask())
        for name in ("thinker/0", "talker/0", "code2wav/0"):
            done = await asyncio.to_thread(ctl, launcher, "restart", name, "--wait", "20")
            assert done.returncode == 0
            assert done.stderr == ""
            assert "done" in done.stdout
        restarted.set()
        loads = await asking
        after = await replicas(other)
        counts = (await other.describe()).counts
    assert loads >= 1
    assert [name for name in after if after[name].pid != before[name].pid] == ["thinker/0", "talker/0", "code2wav/0"]
    assert counts["replays"] == 0, "they finished what they held"


async def test_a_stage_is_scaled_up_and_down_under_load_and_fails_no_request(launcher):
    async with AsyncOmniClient(launcher.endpoint) as client, AsyncOmniClient(launcher.endpoint) as other:
        before = await replicas(other)
        scaled = asyncio.Event()
        healthy: list[bool] = []

        async def ask() -> None:
            """Keep 50 streams open for as long as the scaling takes, and once more after it."""
            last = False
            while not last:
                last = scaled.is_set()
                await Load(client, total=100, width=50).run()

        async def watch() -> None:
            while not scaled.is_set():
                healthy.append((await other.describe()).healthy)
                await asyncio.sleep(0.02)

        asking, watching = asyncio.create_task(ask()), asyncio.create_task(watch())
        for count, words in (("3", "talker/2 starts on node 0"), ("1", "talker/2 leaves")):
            done = await asyncio.to_thread(ctl, launcher, "scale", "talker", count, "--wait", "30")
            assert done.returncode == 0, done.stderr
            assert words in done.stdout
            assert done.stdout.endswith("done\n")
            if count == "3":
                await until_busy(other, "talker/1", "talker/2")
        scaled.set()
        await asyncio.gather(asking, watching)
        after = await replicas(other)
        counts = (await other.describe()).counts
        metrics = await other.metrics()
    assert {name: item.pid for name, item in after.items()} == {name: item.pid for name, item in before.items()}
    assert all(healthy), "neither the start of a replica nor its end is a fault"
    assert counts["replays"] == 0, "they finished what they held"
    assert 'omni_replica_ready{replica="0",stage="talker"} 1' in metrics
    assert 'omni_replica_ready{replica="1",stage="talker"}' not in metrics


async def test_a_stage_follows_its_load_by_itself_and_fails_no_request(launcher):
    command = [sys.executable, "-m", "omni_actors", "ctl", launcher.endpoint, "scale", "--auto", "talker=1:3:4"]
    async with AsyncOmniClient(launcher.endpoint) as client, AsyncOmniClient(launcher.endpoint) as other:
        before = await replicas(other)
        scaled = asyncio.Event()

        async def ask() -> None:
            while not scaled.is_set():
                await Load(client, total=48).run()

        async def are_ready(*wanted: str) -> bool:
            talkers = {name: item for name, item in (await replicas(other)).items() if item.stage == "talker"}
            return set(talkers) == set(wanted) and all(item.state == "ready" for item in talkers.values())

        asking = asyncio.create_task(ask())
        scaling = await asyncio.create_subprocess_exec(*command, "--up", "0", "--down", "1", stderr=subprocess.PIPE)
        await eventually(lambda: are_ready("talker/0", "talker/1", "talker/2"), 20, "three talkers")
        scaled.set()
        await asking
        await eventually(lambda: are_ready("talker/0"), 20, "one talker")
        scaling.terminate()
        said = (await scaling.communicate())[1].decode()
        counts = (await other.describe()).counts
        assert (await replicas(other))["talker/0"].pid == before["talker/0"].pid
    assert "talker gets 3 replicas for" in said
    assert said.splitlines()[-1] == "[omni_actors] talker gets 1 replica for 0 requests"
    assert counts["replays"] == 0, "they finished what they held"


def test_a_mistake_is_explained(launcher):
    for arguments, code, words in (
        (("restart", "talkr/0"), 1, "There is no replica talkr/0"),
        (("drain", "talker"), 1, "does not name a replica"),
        (("scale", "talker", "many"), 2, "is not a whole number from 0 to 65535"),
        (("scale", "talker"), 1, "Stage or number is missing"),
        (("scale", "--auto", "talkr=1:2:3"), 1, "There is no stage talkr. Did you mean 'talker'?"),
        (("scale", "talker", "2", "--auto", "talker=1:2:3"), 1, "--auto takes neither STAGE and N nor --node"),
    ):
        answer = ctl(launcher, *arguments)
        assert (answer.returncode, words in answer.stderr) == (code, True), answer


async def test_sigterm_drains_the_pipeline(launch):
    data = disturbed_chain(0.01)
    data["coordinator"]["drain_timeout"] = 60.0
    launcher = launch(data).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client:
        answers = [asyncio.create_task(ask_and_check(client, text_of(number))) for number in range(20)]
        last = await client.submit("x" * 4000, timeout=120)  # until then the pipeline has something to finish
        await until_in_flight(client, 21)
        launcher.process.send_signal(signal.SIGTERM)
        await eventually(lambda: "no request is taken any more; " in launcher.output, what="heard")
        with pytest.raises(StageUnavailable, match="shutting down"):
            await client.generate("late", modalities=["text"])
        await asyncio.gather(*answers)
        await last.abort()
    assert launcher.wait_end() == 0
