"""Kills stages of echo engines in quick succession under load, and counts what becomes of the requests.

    python benchmarks/storm.py [--kills 20] [--stage thinker] [--poison] [--replicas 1] [--requests 201] [--streams 50]

Kills one ready stage after the other, at random or always the one that is named, 0.5 to 1 s apart; `--poison` adds a
request that crashes the prompt stage. A request takes two to four seconds undisturbed, and its text and audio must be
those of an undisturbed run. Prints how the requests ended and how long the slowest took. Exits with 1 if fewer than
99 % were answered, or the poison did not end as such.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import OmniError, Poison
from omni_actors.stage.echo import CRASH_TOKEN
from tests.support.launcher import launched
from tests.support.load import ask_and_check, disturbed_chain, text_of

STEP_SECONDS = 0.1
APART = (0.5, 1.0)  # seconds between two kills
ANSWERED = 0.99


async def ask(client: AsyncOmniClient, numbers: Iterator[int], ends: collections.Counter[str]) -> float:
    """One stream: request after request. Returns the seconds of the slowest."""
    slowest = 0.0
    for number in numbers:
        began = time.monotonic()
        try:
            await ask_and_check(client, text_of(number))
            ends["answered"] += 1
        except OmniError as error:
            ends[error.code.value] += 1
        slowest = max(slowest, time.monotonic() - began)
    return slowest


async def poison(client: AsyncOmniClient) -> bool:
    with contextlib.suppress(Poison):
        await client.generate({"prompt_token_ids": [65] * 5 + [CRASH_TOKEN]})
        return False
    return True


async def kill(client: AsyncOmniClient, stage: str, count: int, chance: random.Random) -> None:
    while count:
        await asyncio.sleep(chance.uniform(*APART))
        stages = (await client.describe()).stages
        ready = [item.pid for item in stages if item.state == "ready" and stage in ("", item.stage)]
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # it has just ended, or none is ready
            psutil.Process(chance.choice(ready)).kill()
            count -= 1


async def run(endpoint: str, options: argparse.Namespace) -> bool:
    ends: collections.Counter[str] = collections.Counter()
    numbers = iter(range(options.requests))
    began = time.monotonic()
    async with AsyncOmniClient(endpoint) as client, AsyncOmniClient(endpoint) as watcher:
        killing = asyncio.create_task(kill(watcher, options.stage, options.kills, random.Random(options.seed)))
        poisoning = asyncio.create_task(poison(client)) if options.poison else None
        slowest = max(await asyncio.gather(*(ask(client, numbers, ends) for _ in range(options.streams))))
        await killing
        found = poisoning is None or await poisoning
    print(f"{dict(ends)} after {time.monotonic() - began:.0f} s, the slowest in {slowest:.0f} s, poison found: {found}")
    return found and ends["answered"] >= ANSWERED * options.requests


def main(options: argparse.Namespace) -> int:
    data = disturbed_chain(STEP_SECONDS, replicas=options.replicas)
    data["coordinator"] = {}  # a busy machine is no reason for more losses
    with launched(data, loses_stages=True) as launcher:
        return 0 if asyncio.run(run(launcher.endpoint, options)) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stage", default="", help="the stage to kill; default: a random one each time")
    parser.add_argument("--poison", action="store_true")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--requests", type=int, default=201)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(main(parser.parse_args()))
