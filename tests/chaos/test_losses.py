"""Replicas are killed, stopped or stuck while 200 requests run: every answer is that of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import ErrorCode, OmniError, Poison, StageLost, StageUnavailable
from omni_actors.stage.echo import CRASH_TOKEN, GRAB_TOKEN, HANG_TOKEN
from tests.chaos.load import Load, Watch, ask_and_check, connected, disturbed_chain, replicas
from tests.process.launcher import EchoLauncher, until

Launch = Callable[..., EchoLauncher]


async def pid_of(client: AsyncOmniClient, name: str) -> int:
    return (await replicas(client))[name].pid


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav", "prompt"])
async def test_sigkill_at_20_50_80_percent(launch: Launch, stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = launch(disturbed_chain()).wait_ready()
    name = f"{stage}/0"
    async with connected(launcher.endpoint) as (client, watch):

        def kill() -> None:
            asyncio.get_running_loop().create_task(kill_current(watch, name))

        load = Load(client)
        await load.run({0.2: kill, 0.5: kill, 0.8: kill})
        figures = await watch.finish()
        description = await client.describe()
    with capsys.disabled():
        print(f"\nSIGKILL of {stage} three times: {description.counts['replays']} replays, {figures}")
    assert len(watch.recovered) == 3
    assert description.counts["replays"] > 0
    assert description.healthy
    assert launcher.output.count(f"{name} died (killed by signal 9)") == 3
    assert max(watch.noticed) < 1.0
    launcher.wait_idle()


async def kill_current(watch: Watch, name: str) -> None:
    watch.hit(await pid_of(watch.client, name), name)
