"""Measures the cost of a lost stage: the longest silence in an answer after the loss, and the time to its end.

    python benchmarks/recovery.py CONFIG [--set KEY=VALUE] [--stage code2wav] [--runs 5]

Asks for one answer at a time and kills the stage when the first samples arrive. Measures once with what the stages
retain (`retain_bytes` as configured) and once without (0: every request starts again from the prompt). Times are in
seconds; also counts how often each stage computed the request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from omni_actors import config
from omni_actors.client import AsyncOmniClient, Audio
from omni_actors.errors import OmniError

REPOSITORY = Path(__file__).resolve().parent.parent
PROMPT = "Tell me, in a few words, why the sea is salt and the rivers are not."
PARAMS = {"thinker": {"max_tokens": 96, "ignore_eos": True}, "talker": {"max_tokens": 480, "min_tokens": 480}}
SETTLE_SECONDS = 1.5  # until heartbeats have reported all counts


@dataclass
class Measurements:
    """Seconds of each run, and how often each other stage computed the disturbed requests."""

    undisturbed: list[float] = field(default_factory=list)
    silence: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    runs: dict[str, int] = field(default_factory=dict)


def start(arguments: argparse.Namespace, run_dir: str, keep: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "omni_actors.launch", arguments.config, "--run-dir", run_dir]
    overrides = dict(item.split("=", 1) for item in arguments.set)
    for stage in config.load(arguments.config, overrides).pipeline.stages:
        overrides |= {f"stages.{stage.name}.restarts": "1000", f"stages.{stage.name}.restart_backoff": "0.01"}
        if not keep:
            overrides[f"stages.{stage.name}.retain_bytes"] = "0"
    for key, value in overrides.items():
        command += ["--set", f"{key}={value}"]
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)


async def ready(client: AsyncOmniClient, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(600):
        while process.poll() is None:
            try:
                if (await client.describe(timeout=1.0)).healthy:
                    return
            except OmniError:
                continue
            await asyncio.sleep(0.05)
    raise SystemExit(f"the launcher ended with {process.returncode}")


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
            os.kill(next(status.pid for status in stages if status.stage == arguments.stage), signal.SIGKILL)
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
    with tempfile.TemporaryDirectory(prefix="recovery-") as run_dir:
        process = start(arguments, run_dir, keep)
        try:
            async with AsyncOmniClient(f"ipc://{run_dir}/client") as client:
                await ready(client, process)
                await answer(client, arguments, 0, Measurements())  # warms up
                whole = await answer(client, arguments, 0, measured)
                before = await runs(client)
                for _ in range(arguments.runs):
                    again = await answer(client, arguments, 1, measured)
                    if again != whole:
                        raise SystemExit(f"{again} samples instead of {whole}")
                    await ready(client, process)
                after = await runs(client)
                others = [name for name in after if name != arguments.stage]
                measured.runs = {name: after[name] - before[name] for name in others}
        finally:
            process.terminate()
            process.wait(60)
    return measured


def shown(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--stage", default="code2wav")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = {}
    for name, keep in (("kept", True), ("not kept", False)):
        measured = await measure(arguments, keep)
        report[name] = vars(measured)
        print(
            f"{name}: undisturbed {shown(measured.undisturbed)}; after SIGKILL of {arguments.stage}: "
            f"longest silence {shown(measured.silence)}, end {shown(measured.end)}; "
            f"runs of the others for {arguments.runs} requests: {measured.runs}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
