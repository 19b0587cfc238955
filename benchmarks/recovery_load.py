"""The part of `recovery.py` that kills processes under load.

Listeners ask for one answer after the other, each always for its own, so that every answer can be compared with the one
that it got before anything was killed. What is killed is the replica of a stage, the `coordinator`, `all` stages at
once, or by `fault:STAGE` what shares the stage's GPU (`gpu_fault.py`). The table has a row for each kill:

* ready: seconds until all replicas were ready again, and in the last column those of the killed stage's process;
* silence: the time for which a listener who was hearing something heard nothing: the 50th and 95th percentile of all,
  and the longest. Each plays its sound as it comes, without a buffer; what came late because of the kill is a gap;
* done, failed: answers that ended from the kill until the next one; short: those of them with fewer or more tokens or
  samples than before; other: those of the right length that are not equal, bit by bit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
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
FAULT_FOLDER = "GPU_FAULT_FOLDER"
Spoken = tuple[int, int, int]  # tokens, samples, and a checksum of the text and the sound
COORDINATOR, ALL, FAULT = "coordinator", "all", "fault:"  # what can be killed besides a stage


def start(
    path: str,
    overrides: Mapping[str, str],
    run_dir: str,
    stages: Mapping[str, str],
    spared: Mapping[str, int],
    *arguments: str,
) -> subprocess.Popen[bytes]:
    """Start a pipeline whose stages restart at once and without limit.

    Args:
        overrides: of the configuration, by dotted key.
        stages: further settings of every stage.
        spared: spares by stage.
        arguments: further ones of the launch.
    """
    overrides = dict(overrides)
    for stage in config.load(path, overrides).pipeline.stages:
        of_stage = {"restarts": "1000", "restart_backoff": "0.01", **stages}
        overrides |= {f"stages.{stage.name}.{key}": value for key, value in of_stage.items()}
    overrides |= {f"stages.{name}.spares": str(count) for name, count in spared.items()}
    command = [sys.executable, "-m", "omni_actors.launch", path, "--run-dir", run_dir]
    command += [*command_line.set_arguments(overrides), *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)


@contextlib.asynccontextmanager
async def running(
    arguments: argparse.Namespace, stages: Mapping[str, str], spared: Mapping[str, int], *more: str
) -> AsyncIterator[tuple[AsyncOmniClient, subprocess.Popen[bytes], str]]:
    """A pipeline of `start`, once it is ready: a client, the launcher and the run directory."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as run_dir:
        os.environ[FAULT_FOLDER] = run_dir
        process = start(arguments.config, command_line.overrides(arguments), run_dir, stages, spared, *more)
        try:
            async with AsyncOmniClient(f"ipc://{run_dir}/client") as client:
                await ready(client, process)
                yield client, process, run_dir
        finally:
            process.terminate()
            process.wait(60)


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
    silences: dict[int, float] = field(default_factory=dict)  # the longest one, by listener
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
            if spoken[:2] != self._first[number][:2]:
                self._loss.short += 1
            elif spoken != self._first[number]:
                self._loss.other += 1

    async def _answer(self, number: int) -> Spoken:
        arguments = self._arguments
        params = {
            "thinker": {"max_tokens": arguments.text_tokens, "ignore_eos": True},
            "talker": {"max_tokens": arguments.codec_tokens, "min_tokens": arguments.codec_tokens},
        }
        prompt = f"Listener {number}: {arguments.prompt}"
        stream = await self._client.submit(prompt, seed=number, params=params, timeout=READY_SECONDS)
        tokens, samples, words, sound, heard_until = 0, 0, 0, 0, 0.0
        try:
            async for item in stream:
                if isinstance(item, Text):
                    words, tokens = zlib.crc32(item.text.encode(), words), tokens + len(item.token_ids)
                elif isinstance(item, Audio):
                    now = time.monotonic()
                    if samples and self._loss is not None:
                        silences = self._loss.silences
                        silences[number] = max(silences.get(number, 0.0), now - heard_until)
                    self.speaking.add(number)
                    samples, sound = samples + len(item.samples), zlib.crc32(item.samples.tobytes(), sound)
                    heard_until = max(heard_until, now) + len(item.samples) / item.sample_rate
        finally:
            self.speaking.discard(number)
        return tokens, samples, words ^ sound


async def print_load(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Kill each stage in turn, with each number of spares; print the table and return its rows."""
    print("| spares | killed | ready s | silence s: p50 | p95 | longest | done | failed | short | other | start |")
    print("|---" * 11 + "|")
    rows: list[dict[str, Any]] = []
    for spares in arguments.spares:
        known = {stage.name for stage in config.load(arguments.config).pipeline.stages}
        spared = dict.fromkeys(known.intersection(arguments.stages), spares)
        async with running(arguments, {}, spared) as (client, process, run_dir):
            print_start(spares, (await client.describe()).stages)
            async for loss in kills(client, process, arguments, spares, run_dir):
                rows.append(vars(loss))
                print_loss(loss)
    return rows


async def kills(
    client: AsyncOmniClient, process: subprocess.Popen[bytes], arguments: argparse.Namespace, spares: int, run_dir: str
) -> AsyncIterator[Loss]:
    """Yields what each kill has led to, once all is as before."""
    listeners = Listeners(client, arguments)
    await listeners.hear_undisturbed()  # warms up
    undisturbed = Loss(spares, "(none killed)", done=arguments.streams)
    listeners.note_in(undisturbed)
    await listeners.hear_undisturbed()
    yield undisturbed
    load = asyncio.create_task(listeners.listen())
    staggered = Loss(spares, "(none killed, under load)")
    listeners.note_in(staggered)
    while staggered.done + staggered.failed < 2 * arguments.streams:  # noqa: ASYNC110 - set by the answers
        await asyncio.sleep(0.05)
    yield staggered
    for _ in range(arguments.runs):
        for stage in arguments.stages:
            async with asyncio.timeout(READY_SECONDS):
                while not listeners.speaking:  # noqa: ASYNC110 - set by the answers
                    await asyncio.sleep(0.01)
            loss = Loss(spares, stage)
            listeners.note_in(loss)
            loss.ready, loss.start = await kill(client, process, stage, Path(run_dir))
            await asyncio.sleep(arguments.every)
            while stage != COORDINATOR and loss.done + loss.failed < arguments.streams:  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.05)
            yield loss
    listeners.stop()
    rest = Loss(spares, "(until the end)")
    listeners.note_in(rest)
    await load
    yield rest


async def kill(
    client: AsyncOmniClient, process: subprocess.Popen[bytes], stage: str, run_dir: Path
) -> tuple[float, float]:
    """Kill, and return the seconds until all is ready again, and those that the slowest new process took."""
    before = (await client.describe()).stages
    killed = [item for item in before if not item.spare and stage.removeprefix(FAULT) in (item.stage, ALL)]
    pids = [item.pid for item in killed]
    if stage == COORDINATOR:
        children = psutil.Process(process.pid).children()
        pids = [child.pid for child in children if child.cmdline()[0] == "omni:coordinator"]
    began = time.monotonic()
    if stage.startswith(FAULT):
        (run_dir / stage.removeprefix(FAULT)).touch()
    else:
        for pid in pids:
            psutil.Process(pid).kill()
    async with asyncio.timeout(READY_SECONDS):
        while True:
            with contextlib.suppress(OmniError):
                now = {(item.stage, item.replica): item for item in (await client.describe(timeout=0.5)).stages}
                again = [now[item.stage, item.replica] for item in killed]
                known = [now[item.stage, item.replica] for item in before]
                new = all(item.pid not in pids for item in again) and all(item.pid for item in known)
                if new and all(item.state == "ready" for item in known):
                    fresh = [item.start for item in known if item.pid not in {former.pid for former in before}]
                    return time.monotonic() - began, max(fresh, default=0.0)
            await asyncio.sleep(0.02)


def print_start(spares: int, stages: tuple[StageStatus, ...]) -> None:
    for status in stages:
        name = f"(first start of {status.stage}/{status.replica})"
        print(f"| {spares} | {name} | {status.start:.1f} | | | | | | | | {status.start:.1f} |", flush=True)


def print_loss(loss: Loss) -> None:
    heard = sorted(loss.silences.values()) or [0.0]
    silences = " | ".join(f"{heard[min(len(heard) - 1, int(share * len(heard)))]:.2f}" for share in (0.5, 0.95, 1.0))
    counts = f"{loss.done} | {loss.failed} | {loss.short} | {loss.other}"
    print(f"| {loss.spares} | {loss.stage} | {loss.ready:.1f} | {silences} | {counts} | {loss.start:.1f} |", flush=True)
