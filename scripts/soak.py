"""Sends many requests through echo stages, some aborted or late: nothing may be left over, nothing may grow.

    python scripts/soak.py [--requests 10000] [--concurrency 64] [--seed 0]

Exits with 1 unless every request ended properly exactly once, no process holds anything afterwards, and no process's
memory has grown by more than 5 % since a fifth of the requests was done.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import Aborted, DeadlineExceeded, OmniError
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher

WARM_UP = 0.2


def configuration() -> dict:
    data = chain()
    for stage in data["stages"]:
        # Rows of 40 kB: they go through the arena.
        stage["engine"] = {"step_seconds": 0.001, "row_width": 20_000, "samples_per_token": 48}
    data["coordinator"] = {"heartbeat_interval": 0.2, "tombstone_ttl": 5.0}
    return data


async def one(client: AsyncOmniClient, chance: random.Random, ends: collections.Counter[str]) -> None:
    """Run a request that completes, is aborted on its way, or has little time."""
    text = "x" * chance.randrange(1, 40)
    kind = chance.choice(("whole", "whole", "abort", "deadline"))
    timeout = chance.uniform(0.001, 0.3) if kind == "deadline" else 60.0
    modalities = chance.choice((["text"], ["audio"], ["text", "audio"]))
    try:
        stream = await client.submit(text, modalities=modalities, timeout=timeout)
        if kind == "abort":
            await asyncio.sleep(chance.uniform(0, 0.2))
            await stream.abort()
        output = await stream.result()
        good = output.text == (text if "text" in modalities else "")
        ends["finished" if good else "wrong answer"] += 1
    except (Aborted, DeadlineExceeded) as error:
        ends[error.code.value] += 1
    except OmniError as error:
        ends[f"unexpected {error.code.value}"] += 1


def memory(launcher: EchoLauncher) -> dict[str, int]:
    pids = {stage.stage: stage.pid for stage in launcher.describe().stages} | {"launcher": launcher.process.pid}
    return {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}


async def run(launcher: EchoLauncher, options: argparse.Namespace) -> tuple[collections.Counter[str], dict[str, int]]:
    chance = random.Random(options.seed)
    ends: collections.Counter[str] = collections.Counter()
    slots = asyncio.Semaphore(options.concurrency)
    before: dict[str, int] = {}

    async with AsyncOmniClient(launcher.endpoint) as client:

        async def limited() -> None:
            async with slots:
                await one(client, chance, ends)

        warm_up = int(options.requests * WARM_UP)
        await asyncio.gather(*(limited() for _ in range(warm_up)))
        before = memory(launcher)
        await asyncio.gather(*(limited() for _ in range(options.requests - warm_up)))
    return ends, before


def main(options: argparse.Namespace) -> int:
    failures = []
    with tempfile.TemporaryDirectory(prefix="sk-", dir="/tmp") as name:
        launcher = EchoLauncher(Path(name), configuration()).wait_ready()
        try:
            began = time.monotonic()
            ends, before = asyncio.run(run(launcher, options))
            print(f"{options.requests} requests in {time.monotonic() - began:.0f} s: {dict(ends)}")
            launcher.wait_idle(10)
            print("every process holds nothing")
            for process, size in memory(launcher).items():
                print(f"RSS of {process}: {before[process] / 2**20:.1f} -> {size / 2**20:.1f} MiB")
                if size > options.growth * before[process]:
                    failures.append(f"{process} grows")
            failures += [end for end in ends if end not in ("finished", "aborted", "deadline_exceeded")]
            if ends.total() != options.requests:
                failures.append("not every request ended")
            if launcher.end() != 0:
                failures.append("the pipeline did not end well")
        finally:
            if launcher.process.poll() is None:
                launcher.process.kill()
    print("failed: " + ", ".join(failures) if failures else "good")
    return 1 if failures else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth", type=float, default=1.05, help="allowed growth of memory; larger for short runs")
    sys.exit(main(parser.parse_args()))
