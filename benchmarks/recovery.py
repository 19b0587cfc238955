"""Cost of a lost stage: `python benchmarks/recovery.py CONFIG [--set KEY=VALUE] [--stage code2wav] [--runs 5]`.

Requests one answer at a time and kills the stage after its first sound. Measures the longest silence after it and the
time to the end of the answer, once with what the stages keep (`retain_bytes` as configured) and once without (0:
everything starts over at the beginning of the pipeline), and counts how often each stage computed the request.
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
SETTLE_SECONDS = 1.5  # until heartbeats have brought all counts


@dataclass
class Figures:
    """Seconds of each run, and what each stage computed for the requests that were disturbed."""

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


async def answer(client: AsyncOmniClient, arguments: argparse.Namespace, kill_after: int, figures: Figures) -> int:
    """One answer; the number of its samples. The stage dies after `kill_after` of them, 0 for never."""
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
        figures.silence.append(silence)
        figures.end.append(time.monotonic() - killed)
    else:
        figures.undisturbed.append(time.monotonic() - began)
    return samples


async def runs(client: AsyncOmniClient) -> dict[str, int]:
    await asyncio.sleep(SETTLE_SECONDS)
    return {status.stage: status.counts.get("total_runs", 0) for status in (await client.describe()).stages}


async def measure(arguments: argparse.Namespace, keep: bool) -> Figures:
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="recovery-") as run_dir:
        process = start(arguments, run_dir, keep)
        try:
            async with AsyncOmniClient(f"ipc://{run_dir}/client") as client:
                await ready(client, process)
                await answer(client, arguments, 0, Figures())  # warms up
                whole = await answer(client, arguments, 0, figures)
                before = await runs(client)
                for _ in range(arguments.runs):
                    again = await answer(client, arguments, 1, figures)
                    if again != whole:
                        raise SystemExit(f"{again} samples instead of {whole}")
                    await ready(client, process)
                after = await runs(client)
                others = [name for name in after if name != arguments.stage]
                figures.runs = {name: after[name] - before[name] for name in others}
        finally:
            process.terminate()
            process.wait(60)
    return figures


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
        figures = await measure(arguments, keep)
        report[name] = vars(figures)
        print(
            f"{name}: undisturbed {shown(figures.undisturbed)}; after SIGKILL of {arguments.stage}: "
            f"longest silence {shown(figures.silence)}, end {shown(figures.end)}; "
            f"runs of the others for {arguments.runs} requests: {figures.runs}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
