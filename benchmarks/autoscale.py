"""A day's load in minutes, with `omni-actors ctl scale --auto` and, at the same time, with all replicas throughout.

    python benchmarks/autoscale.py [--minutes 10] [--most 8] [--peak 15] [--seed 0]

People ask an echo pipeline for a text and its sound at random moments, few in the morning, most at noon (`--peak` a
second), few at night, and wait for no one. A talker holds two requests at a time for half a second each; the other
stages have no limit. Prints how the answers ended, their times and how many talkers there were, and exits with 1 if one
is lost or wrong, replicas never reached `--most` or did not come back to one, or the 95th percentile of the times is
over twice that with `--most` talkers throughout.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import OmniError
from tests.support.builders import chain
from tests.support.launcher import launched
from tests.support.load import LETTERS

TOKENS = 5
STEP_SECONDS = 0.1  # of the talker, which makes a token of each of two requests meanwhile
PER_TALKER = 1  # requests, half of what it can hold
NIGHT = 0.02  # of the load at noon
END_SECONDS = 40.0  # after the day, until one talker is left


@dataclass
class Day:
    """What was seen of a day."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    talkers: list[int] = field(default_factory=list)

    def shown(self) -> str:
        counts = f"{min(self.talkers)} to {max(self.talkers)} talkers, {self.talkers[-1]} at the end"
        mean = sum(self.talkers) / len(self.talkers)
        text = f"{len(self.seconds)} answers, {len(self.failures)} lost or wrong, p50 {self.part(50):.2f} s"
        return f"{text}, p95 {self.part(95):.2f} s; {counts}, {mean:.1f} in the mean"

    def part(self, percent: int) -> float:
        return sorted(self.seconds)[len(self.seconds) * percent // 100]


def configuration(talkers: int) -> dict[str, Any]:
    data = chain()
    for stage in data["stages"]:
        stage["engine"] = {"step_seconds": 0.001}
    data["stages"][2] |= {"engine": {"step_seconds": STEP_SECONDS, "max_num_seqs": 2}, "replicas": talkers}
    return data


async def ask(client: AsyncOmniClient, chance: random.Random, day: Day) -> None:
    text = "".join(chance.choices(LETTERS, k=TOKENS))
    began = time.monotonic()
    try:
        output = await client.generate(text, modalities=["text", "audio"], timeout=60)
        if output.text != text or output.audio is None:
            day.failures.append(f"{text} became {output.text}")
    except OmniError as error:
        day.failures.append(repr(error))
    day.seconds.append(time.monotonic() - began)


async def count_talkers(client: AsyncOmniClient, day: Day) -> None:
    while True:
        stages = (await client.describe()).stages
        day.talkers.append(sum(item.stage == "talker" for item in stages))
        await asyncio.sleep(1.0)


async def run(endpoint: str, options: argparse.Namespace, *, auto: bool) -> Day:
    """One day: arrivals as a Poisson process whose rate is a cosine, and the wait for what is left."""
    day, chance, seconds = Day(), random.Random(options.seed), 60 * options.minutes
    async with AsyncOmniClient(endpoint) as client, AsyncOmniClient(endpoint) as watcher:
        counting = asyncio.create_task(count_talkers(watcher, day))
        began, due, asked = time.monotonic(), 0.0, []
        while due < seconds:
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
            asked.append(asyncio.create_task(ask(client, chance, day)))
            rate = options.peak * (NIGHT + (1 - NIGHT) * (1 - math.cos(2 * math.pi * due / seconds)) / 2)
            due += chance.expovariate(rate)
        await asyncio.gather(*asked)
        ending = time.monotonic() + (END_SECONDS if auto else 0.0)
        while time.monotonic() < ending and day.talkers[-1] > 1:  # noqa: ASYNC110 - the state is another process's
            await asyncio.sleep(0.5)
        counting.cancel()
    return day


def measure(options: argparse.Namespace, *, auto: bool) -> Day:
    with launched(configuration(1 if auto else options.most)) as launcher:
        bounds = f"talker=1:{options.most}:{PER_TALKER}"
        command = [sys.executable, "-m", "omni_actors", "ctl", launcher.endpoint, "scale", "--auto", bounds]
        scaling = subprocess.Popen([*command, "--up", str(options.up), "--down", str(options.down)]) if auto else None
        try:
            return asyncio.run(run(launcher.endpoint, options, auto=auto))
        finally:
            if scaling is not None:
                scaling.terminate()
                scaling.wait(10)


async def main(options: argparse.Namespace) -> int:
    """Both at the same time, so that what else the machine does is the same for both."""
    scaled, steady = await asyncio.gather(
        asyncio.to_thread(measure, options, auto=True), asyncio.to_thread(measure, options, auto=False)
    )
    print(f"auto: {scaled.shown()}\nsteady: {steady.shown()}")
    slower = scaled.part(95) / steady.part(95)
    print(f"p95 is {slower:.2f} times the steady one", *scaled.failures[:5], sep="\n")
    reached = max(scaled.talkers) == options.most and scaled.talkers[-1] == 1
    return 0 if reached and not scaled.failures and slower <= 2 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--most", type=int, default=8, help="talkers")
    parser.add_argument("--peak", type=float, default=15.0, help="requests a second at noon")
    parser.add_argument("--up", type=float, default=2.0, help="as of `ctl scale --auto`")
    parser.add_argument("--down", type=float, default=30.0, help="as of `ctl scale --auto`")
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(asyncio.run(main(parser.parse_args())))
