"""The part of `recovery.py` that kills stages under load.

Listeners ask for one answer after the other, each always for its own, so that every answer can be compared with the one
that it got before anything was killed. The table has a row for each kill:

* ready: seconds until the killed replica was ready again, and in the last column those of its process;
* silence: the longest time for which a listener heard nothing. Each plays its sound as it comes, without a buffer; what
  came late because of the kill is a gap;
* done, failed: answers that ended from the kill until the next one; short: those of them with fewer or more tokens or
  samples than before; other: those of the right length with other words.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command_line
import psutil

from omni_actors import config
from omni_actors.client import AsyncOmniClient, Audio, Text
from omni_actors.errors import OmniError
from omni_actors.protocol.messages import StageStatus

REPOSITORY = Path(__file__).resolve().parent.parent
READY_SECONDS = 900.0
WARM_SECONDS = 2.0  # of undisturbed load before each kill
Spoken = tuple[str, int, int]  # text, its tokens, samples


def start(
    path: str,
    overrides: Mapping[str, str],
    run_dir: str,
    stages: Mapping[str, str],
    spared: Mapping[str, int] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a pipeline whose stages restart at once and without limit.

    Args:
        overrides: of the configuration, by dotted key.
        stages: further settings of every stage.
        spared: spares by stage.
    """
    overrides = dict(overrides)
    for stage in config.load(path, overrides).pipeline.stages:
        of_stage = {"restarts": "1000", "restart_backoff": "0.01", **stages}
        overrides |= {f"stages.{stage.name}.{key}": value for key, value in of_stage.items()}
    overrides |= {f"stages.{name}.spares": str(count) for name, count in (spared or {}).items()}
    command = [sys.executable, "-m", "omni_actors.launch", path, "--run-dir", run_dir]
    command += command_line.set_arguments(overrides)
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)


async def ready(client: AsyncOmniClient, process: subprocess.Popen[bytes]) -> None:
    """Wait until all replicas are ready, spares included."""
    async with asyncio.timeout(READY_SECONDS):
        while process.poll() is None:
            try:
                if all(status.state == "ready" for status in (await client.describe(timeout=1.0)).stages):
                    return
            except OmniError:
                continue
            await asyncio.sleep(0.05)
    raise SystemExit(f"the launcher ended with {process.returncode}")


@dataclass
class Loss:
    """What a kill has led to."""

    spares: int
    stage: str
    ready: float = 0.0  # seconds, as all times here
    silence: float = 0.0
    done: int = 0
    failed: int = 0
    short: int = 0
    other: int = 0
    start: float = 0.0


class Listeners:
    """Ask for answers until told to stop, and note what they hear after a kill."""

    def __init__(self, client: AsyncOmniClient, arguments: argparse.Namespace) -> None:
        self._client = client
        self._arguments = arguments
        self._first: dict[int, Spoken] = {}
        self._loss: Loss | None = None
        self._stopping = False
        self.speaking: set[int] = set()  # those that have heard something of the answer that they are waiting for

    async def hear_undisturbed(self) -> None:
        """Get the answers to compare with, all at the same time; what is noted is what the load alone does."""
        spoken = await asyncio.gather(*(self._answer(number) for number in range(self._arguments.streams)))
        self._first = dict(enumerate(spoken))

    async def listen(self) -> None:
        """Ask until `stop`."""
        await asyncio.gather(*(self._listen(number) for number in range(self._arguments.streams)))

    def stop(self) -> None:
        """Ask for no more answers."""
        self._stopping = True

    def note_in(self, loss: Loss) -> None:
        """Note what is heard from now on in `loss`."""
        self._loss = loss

    async def _listen(self, number: int) -> None:
        while not self._stopping:
            spoken: Spoken | None = None
            try:
                spoken = await self._answer(number)
            except OmniError as error:
                print(f"an answer failed: {error.code.value}: {error}", file=sys.stderr, flush=True)
            if self._loss is None:
                continue
            if spoken is None:
                self._loss.failed += 1
                continue
            self._loss.done += 1
            if spoken[1:] != self._first[number][1:]:
                self._loss.short += 1
            elif spoken[0] != self._first[number][0]:
                self._loss.other += 1

    async def _answer(self, number: int) -> Spoken:
        arguments = self._arguments
        params = {
            "thinker": {"max_tokens": arguments.text_tokens, "ignore_eos": True},
            "talker": {"max_tokens": arguments.codec_tokens, "min_tokens": arguments.codec_tokens},
        }
        prompt = f"Listener {number}: {arguments.prompt}"
        stream = await self._client.submit(prompt, seed=number, params=params, timeout=READY_SECONDS)
        text, tokens, samples, heard_until = "", 0, 0, 0.0
        try:
            async for item in stream:
                if isinstance(item, Text):
                    text, tokens = text + item.text, tokens + len(item.token_ids)
                elif isinstance(item, Audio):
                    now = time.monotonic()
                    if samples and self._loss is not None:
                        self._loss.silence = max(self._loss.silence, now - heard_until)
                    self.speaking.add(number)
                    samples += len(item.samples)
                    heard_until = max(heard_until, now) + len(item.samples) / item.sample_rate
        finally:
            self.speaking.discard(number)
        return text, tokens, samples


async def print_load(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Kill each stage in turn, with each number of spares; print the table and return its rows."""
    print("| spares | stage | ready s | silence s | done | failed | short | other | start |\n|---" + "|---" * 8 + "|")
    rows: list[dict[str, Any]] = []
    for spares in arguments.spares:
        with tempfile.TemporaryDirectory(prefix="recovery-") as run_dir:
            spared = dict.fromkeys(arguments.stages, spares)
            process = start(arguments.config, command_line.overrides(arguments), run_dir, {}, spared)
            try:
                async with AsyncOmniClient(f"ipc://{run_dir}/client") as client:
                    await ready(client, process)
                    print_start(spares, (await client.describe()).stages)
                    async for loss in kills(client, process, arguments, spares):
                        rows.append(vars(loss))
                        print_loss(loss)
            finally:
                process.terminate()
                process.wait(60)
    return rows


async def kills(
    client: AsyncOmniClient, process: subprocess.Popen[bytes], arguments: argparse.Namespace, spares: int
) -> AsyncIterator[Loss]:
    """Yields what each kill has led to, once all is as before."""
    listeners = Listeners(client, arguments)
    await listeners.hear_undisturbed()  # warms up
    undisturbed = Loss(spares, "(none killed)", done=arguments.streams)
    listeners.note_in(undisturbed)
    await listeners.hear_undisturbed()
    yield undisturbed
    load = asyncio.create_task(listeners.listen())
    for _ in range(arguments.runs):
        for stage in arguments.stages:
            async with asyncio.timeout(READY_SECONDS):
                await asyncio.sleep(WARM_SECONDS)
                while not listeners.speaking:  # noqa: ASYNC110 - set by the answers
                    await asyncio.sleep(0.01)
            loss = Loss(spares, stage)
            listeners.note_in(loss)
            loss.ready, loss.start = await kill(client, stage)
            await ready(client, process)
            while loss.done + loss.failed < arguments.streams:  # noqa: ASYNC110 - what was in flight has to end
                await asyncio.sleep(0.05)
            yield loss
    listeners.stop()
    await load


async def kill(client: AsyncOmniClient, stage: str) -> tuple[float, float]:
    """Kill the replica that serves; return the seconds until it is ready again, and those that its process took."""
    killed = next(item for item in (await client.describe()).stages if item.stage == stage and not item.spare)
    began = time.monotonic()
    psutil.Process(killed.pid).kill()
    async with asyncio.timeout(READY_SECONDS):
        while True:
            statuses = (await client.describe(timeout=5.0)).stages
            now = next(item for item in statuses if (item.stage, item.replica) == (stage, killed.replica))
            if now.state == "ready" and now.pid != killed.pid:
                return time.monotonic() - began, now.start
            await asyncio.sleep(0.02)


def print_start(spares: int, stages: tuple[StageStatus, ...]) -> None:
    for status in stages:
        name = f"(first start of {status.stage}/{status.replica})"
        print(f"| {spares} | {name} | {status.start:.1f} | | | | | | {status.start:.1f} |", flush=True)


def print_loss(loss: Loss) -> None:
    counts = f"{loss.done} | {loss.failed} | {loss.short} | {loss.other}"
    row = f"| {loss.spares} | {loss.stage} | {loss.ready:.1f} | {loss.silence:.1f} | {counts} | {loss.start:.1f} |"
    print(row, flush=True)
