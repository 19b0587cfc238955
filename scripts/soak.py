"""Sends many requests through echo stages, some aborted or late: nothing may be left over, nothing may grow.

    python scripts/soak.py [--requests 10000] [--concurrency 64] [--seed 0]

Exits with 1 unless every request ended properly exactly once, no process holds anything afterwards, and no process's
private memory grows. That is read 20 times, when nothing is in flight, without the arenas and with an allocator that
returns at once what is freed. The highest of the last quarter may exceed that of the first half by 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import Aborted, DeadlineExceeded, OmniError
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher

READINGS = 20
# Of glibc: otherwise processes keep a varying amount of what they have freed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "16384", "MALLOC_ARENA_MAX": "1"}


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
    """Private bytes of each process, without its arena, of which more or less is touched as blocks are reused."""
    pids = {stage.stage: stage.pid for stage in launcher.describe().stages} | {"launcher": launcher.process.pid}
    maps = {name: psutil.Process(pid).memory_maps(grouped=False) for name, pid in pids.items()}
    return {
        name: sum(each.private_clean + each.private_dirty for each in own if "memfd:" not in each.path)
        for name, own in maps.items()
    }


def grows(sizes: Sequence[int], growth: float) -> bool:
    """Whether the highest of the last quarter of the readings exceeds that of the first half by more than a factor."""
    return max(sizes[-len(sizes) // 4 :]) > growth * max(sizes[: len(sizes) // 2])


async def run(
    launcher: EchoLauncher, options: argparse.Namespace
) -> tuple[collections.Counter[str], list[dict[str, int]]]:
    chance = random.Random(options.seed)
    ends: collections.Counter[str] = collections.Counter()
    slots = asyncio.Semaphore(options.concurrency)
    readings = []

    async with AsyncOmniClient(launcher.endpoint) as client:

        async def limited() -> None:
            async with slots:
                await one(client, chance, ends)

        for part in range(READINGS):
            count = options.requests * (part + 1) // READINGS - options.requests * part // READINGS
            await asyncio.gather(*(limited() for _ in range(count)))
            await asyncio.to_thread(launcher.wait_idle, 10)
            readings.append(memory(launcher))
    return ends, readings


def main(options: argparse.Namespace) -> int:
    failures = []
    os.environ |= ALLOCATOR
    with tempfile.TemporaryDirectory(prefix="sk-", dir="/tmp") as name:
        launcher = EchoLauncher(Path(name), configuration()).wait_ready()
        try:
            began = time.monotonic()
            ends, readings = asyncio.run(run(launcher, options))
            print(f"{options.requests} requests in {time.monotonic() - began:.0f} s: {dict(ends)}")
            launcher.wait_idle(10)
            print("every process holds nothing")
            for process in readings[0]:
                sizes = [reading[process] for reading in readings]
                print(f"private memory of {process}: {', '.join(f'{size / 2**20:.0f}' for size in sizes)} MiB")
                if grows(sizes, options.growth):
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
