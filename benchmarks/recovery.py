"""Measures the cost of a lost stage: the longest silence in an answer after the loss, and the time to its end.

    python benchmarks/recovery.py CONFIG [--set KEY=VALUE] [--stage code2wav] [--runs 5] [--losses LOSS ...]

Asks for one answer at a time and kills the stage when the first samples arrive. Measures once with what the stages
retain (`retain_bytes` as configured) and once without (0: every request starts again from the prompt). Times are in
seconds; also counts how often each stage computed the request.

Then measures, on an idle pipeline, how soon each loss is noticed and repaired: a signal to the stage (`SIGKILL`,
`SIGSTOP`), a `hang` of an echo stage's engine loop, or one to the `coordinator`, an HTTP process (`http`) or the fork
server (`forkserver`): SIGKILL, unless another one follows (`http:SIGSTOP`).

    python benchmarks/recovery.py CONFIG --streams 16 [--spares 0 1] [--stages thinker talker code2wav] [--runs 2]

Measures under load instead: so many listeners ask for one answer after the other while each of `--stages` is killed in
turn, also `coordinator` or `all` stages at once, `--runs` times. `benchmarks/recovery_load.py` says what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import command_line
import httpx
import psutil
from recovery_load import print_load, ready, running

from omni_actors.client import AsyncOmniClient, Audio
from omni_actors.errors import OmniError
from omni_actors.protocol.messages import StageStatus
from omni_actors.stage.echo import HANG_TOKEN

PROMPT = "Tell me, in a few words, why the sea is salt and the rivers are not."
PARAMS = {"thinker": {"max_tokens": 96, "ignore_eos": True}, "talker": {"max_tokens": 480, "min_tokens": 480}}
NOT_KEPT = {"retain_bytes": "0"}  # of every stage
SETTLE_SECONDS = 1.5  # until heartbeats have reported all counts


@dataclass
class Measurements:
    """Seconds of each run, and how often each other stage computed the disturbed requests."""

    undisturbed: list[float] = field(default_factory=list)
    silence: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    runs: dict[str, int] = field(default_factory=dict)


async def answer(
    client: AsyncOmniClient, arguments: argparse.Namespace, kill_after: int, measured: Measurements
) -> int:
    """Ask for an answer; return its number of samples. Kills the stage after `kill_after` of them, if not 0."""
    stream = await client.submit(arguments.prompt, seed=3, params=PARAMS, timeout=300)
    samples, began, killed, silence, last = 0, time.monotonic(), 0.0, 0.0, 0.0
    async for item in stream:
        if not isinstance(item, Audio):
            continue
        now = time.monotonic()
        if killed:
            silence, last = max(silence, now - last), now
        samples += len(item.samples)
        if kill_after and samples >= kill_after and not killed:
            stages = (await client.describe()).stages
            killed = last = time.monotonic()
            psutil.Process(next(status.pid for status in stages if status.stage == arguments.stage)).kill()
    if killed:
        measured.silence.append(silence)
        measured.end.append(time.monotonic() - killed)
    else:
        measured.undisturbed.append(time.monotonic() - began)
    return samples


async def runs(client: AsyncOmniClient) -> dict[str, int]:
    await asyncio.sleep(SETTLE_SECONDS)
    return {status.stage: status.counts.get("total_runs", 0) for status in (await client.describe()).stages}


async def measure(arguments: argparse.Namespace, keep: bool) -> Measurements:
    measured = Measurements()
    async with running(arguments, {} if keep else NOT_KEPT, {}) as (client, process, _):
        await answer(client, arguments, 0, Measurements())  # warms up
        whole = await answer(client, arguments, 0, measured)
        before = await runs(client)
        for _ in range(arguments.runs):
            again = await answer(client, arguments, 1, measured)
            if again != whole:
                raise SystemExit(f"{again} samples instead of {whole}")
            await ready(client, process)
        after = await runs(client)
        measured.runs = {name: after[name] - before[name] for name in after if name != arguments.stage}
    return measured


async def lost(client: AsyncOmniClient, before: StageStatus) -> bool:
    try:
        stages = (await client.describe(timeout=0.5)).stages
    except OmniError:
        return True
    return not any(status.pid == before.pid and status.state == "ready" for status in stages)


def child_named(pid: int, name: str) -> psutil.Process:
    """The process of that name that a launcher has started."""
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.ZombieProcess):
            if name in " ".join(child.cmdline()[:3]):
                return child
    raise SystemExit(f"there is no {name}")


async def served(*addresses: str) -> None:
    """Wait until a server at each of these answers."""
    for address in addresses:
        while True:
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient(timeout=1.0) as client:
                    if (await client.get(f"http://{address}/health")).status_code == 200:
                        break
            await asyncio.sleep(0.02)


async def detect(arguments: argparse.Namespace, loss: str) -> tuple[list[float], list[float]]:
    """Seconds from each loss until a description shows it, and until all replicas are ready again.

    For the coordinator and HTTP only the second: clients wait for a successor.
    """
    noticed, back = [], []
    name, _, number = loss.partition(":")
    with socket.create_server(("127.0.0.1", 0)) as free:
        http = ["--http", f"127.0.0.1:{free.getsockname()[1]}"] if name == "http" else []
    async with running(arguments, {}, {}, *http) as (client, process, _):
        for _ in range(arguments.runs):
            await served(*http[1:])
            statuses = (await client.describe()).stages
            before = next(status for status in statuses if status.stage == arguments.stage)
            began = time.monotonic()
            if name in ("coordinator", "http", "forkserver"):
                child_named(process.pid, name).send_signal(signal.Signals[number or "SIGKILL"])
            elif loss == "hang":
                before = statuses[0]
                await client.submit({"prompt_token_ids": [HANG_TOKEN]}, modalities=["text"])
            else:
                psutil.Process(before.pid).send_signal(signal.Signals[loss])
            if name not in ("coordinator", "http"):
                while not await lost(client, before):  # noqa: ASYNC110 - the state is another process's
                    await asyncio.sleep(0.005)
                noticed.append(time.monotonic() - began)
            await ready(client, process)
            await served(*http[1:])
            back.append(time.monotonic() - began)
    return noticed, back


def shown(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    command_line.add_flags(parser)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--stage", default="code2wav")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--losses", nargs="*", default=["SIGKILL", "SIGSTOP", "coordinator"], metavar="LOSS")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, default=0, help="measure under the load of so many listeners")
    parser.add_argument("--spares", type=int, nargs="*", default=[0, 1], help="of each stage that is killed")
    stages = ["thinker", "talker", "code2wav"]
    parser.add_argument("--stages", nargs="*", default=stages, help="to kill, or `coordinator`, `all`, `fault:STAGE`")
    parser.add_argument("--every", type=float, default=2.0, help="seconds from when all is ready until the next kill")
    parser.add_argument("--text-tokens", type=int, default=96)
    parser.add_argument("--codec-tokens", type=int, default=480)
    arguments = parser.parse_args()
    if arguments.streams:
        rows = await print_load(arguments)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1))
        return
    report: dict[str, Any] = {}
    for name, keep in (("kept", True), ("not kept", False)):
        measured = await measure(arguments, keep)
        report[name] = vars(measured)
        print(
            f"{name}: undisturbed {shown(measured.undisturbed)}; after SIGKILL of {arguments.stage}: "
            f"longest silence {shown(measured.silence)}, end {shown(measured.end)}; "
            f"runs of the others for {arguments.runs} requests: {measured.runs}",
            flush=True,
        )
    for loss in arguments.losses:
        noticed, back = await detect(arguments, loss)
        report[loss] = {"noticed": noticed, "back": back}
        seen = f"noticed after {shown(noticed)}, " if noticed else ""
        print(f"{loss}: {seen}all ready again after {shown(back)}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
