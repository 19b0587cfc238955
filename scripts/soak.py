"""Sends many requests through echo stages that are killed again and again: nothing may be left over, nothing may grow.

    python scripts/soak.py [--requests 10000] [--kills 0.01] [--slow 0.1] [--concurrency 64] [--seed 0]
    python scripts/soak.py --config stage_configs/tiny_qwen3_omni.yaml --model FOLDER --requests 1000 --concurrency 8
    python scripts/soak.py --any-process --minutes 60 --requests 100000

With `--config` the stages are those of a model, whose answers are short, and the memory is what is resident. The KV
cache of a model is touched bit by bit: make it small. On CPUs oneDNN keeps the code of 1,024 shapes, up to some hundred
MiB, which takes thousands of requests; here it keeps one.

Some requests are aborted, some have little time, and a part of them comes from a client that does not read for a third
of a second at a time. For every 100th request a stage gets SIGKILL. Exits with 1 unless every request ended exactly
once with its whole answer or a typed error, 99 % of those that were neither aborted nor short of time with an answer
(without kills all of them), no process holds anything afterwards, and no process's private memory grows. That is read
20 times, when nothing is in flight, without the arenas and with an allocator that returns at once what is freed. The
first quarter is warm-up; of what follows, the last third may exceed the first by 2 MiB per 1,000 requests between them,
by the medians. A stage that was killed counts when it is warm.

With `--any-process` every request is to complete, however long it takes, equal to the undisturbed answer. One in ten
comes over HTTP, some of those with a sound; a broken connection or a refusal that says so is tried again, as clients of
OpenAI do. Every 2 to 10 s any process of the pipeline but its launcher gets SIGKILL or, one time in four, SIGSTOP:
stages, the coordinator, HTTP processes, decoders, the fork server. `--minutes` spreads the requests over that time.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import numpy
import psutil
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omni_actors.client import AsyncOmniClient
from omni_actors.client.streams import OmniRequestOutput
from omni_actors.errors import Aborted, DeadlineExceeded, OmniError
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.load import LETTERS
from tests.support.processes import assert_nothing_left, processes_of, shared_memory_of
from tests.support.servers import free_port, sound
from tests.support.waiting import until

ANSWERED = 0.99  # of the requests that are neither aborted nor short of time, if stages are killed
START_SECONDS = 120.0
WARM = 100  # requests after which the memory of a process counts
SLOW_SECONDS = 0.3  # for which the slow client does not read
ENOUGH_SECONDS = 120.0  # until the deadline of the requests that should complete
FEWEST_READINGS = 4  # of a process that can be judged
APART = (2.0, 10.0)  # seconds between two losses of any process
STOPPED = 0.25  # of those losses that are a SIGSTOP
HTTP_SHARE = 0.1  # of the requests
HTTP_TRIES = 8  # 1, 2, 4 s ... apart
SOUND = base64.b64encode(sound(0.2)).decode()
SAMPLES = 48  # of a token
MEBIBYTE = 2**20
# Otherwise processes keep a varying amount of what they have freed, and code for every shape that they have met.
LIBRARIES = {
    "MALLOC_MMAP_THRESHOLD_": "16384",
    "MALLOC_TRIM_THRESHOLD_": "16384",
    "MALLOC_ARENA_MAX": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1",
}

Ends = collections.Counter[str]


def configuration(options: argparse.Namespace) -> dict:
    if options.config is not None:
        return {**yaml.safe_load(options.config.read_text()), "model": str(options.model.absolute())}
    data = chain()
    for stage in data["stages"]:
        # Rows of 40 kB: they go through the arena.
        stage["engine"] = {"step_seconds": 0.001, "row_width": 20_000, "samples_per_token": SAMPLES}
    data["coordinator"] = {"heartbeat_interval": 0.2, "tombstone_ttl": 5.0}
    if options.any_process:
        data["coordinator"] |= {"restarts": 1000}
        data["http"] = {"workers": 2}
    return data


class Losses:
    """Sends SIGKILL or SIGSTOP to any process below the launcher, again and again."""

    def __init__(self, launcher: EchoLauncher, chance: random.Random) -> None:
        self._launcher = psutil.Process(launcher.process.pid)
        self._chance = chance
        self.counts: collections.Counter[str] = collections.Counter()

    def hit(self) -> None:
        """Choose a process and a signal."""
        number = signal.SIGSTOP if self._chance.random() < STOPPED else signal.SIGKILL
        with contextlib.suppress(psutil.Error, IndexError):  # it has just ended
            process = self._chance.choice(self._launcher.children(recursive=True))
            title = kind_of(process)
            process.send_signal(number)
            self.counts[f"{title} {number.name}"] += 1

    async def go_on(self) -> None:
        """Hit one process after the other until cancelled."""
        while True:
            await asyncio.sleep(self._chance.uniform(*APART))
            self.hit()


def kind_of(process: psutil.Process) -> str:
    """What a process of a pipeline is; a stage by its name without the replica."""
    command = process.cmdline()
    if command[0].startswith("omni:"):
        return command[0].split("/")[0].split()[0]
    starting = ("omni_actors.coordinator", "omni_actors.http_server")
    known = ("forkserver", "resource_tracker", "decoders", *starting)
    return next((name for name in known if name in " ".join(command)), "other")


class Load:
    """The requests for a pipeline, and whether an answer is one."""

    def __init__(self, data: dict, *, echoes: bool) -> None:
        self._writers = [stage["name"] for stage in data["stages"] if stage["kind"] == "autoregressive"]
        self._echoes = echoes

    def params(self, chance: random.Random) -> dict:
        """Lengths, for the stages of a model that have them."""
        return {stage: {"max_tokens": chance.randrange(3, 16)} for stage in self._writers}

    def is_answer(self, text: str, modalities: Sequence[str], output: OmniRequestOutput) -> bool:
        """Whether an output has what was asked for, and nothing else."""
        if self._echoes:
            samples = numpy.repeat(numpy.frombuffer(text.encode(), numpy.uint8) / 256, SAMPLES).astype(numpy.float32)
            heard = numpy.zeros(0) if output.audio is None else output.audio
            wanted = samples if "audio" in modalities else numpy.zeros(0)
            return output.text == (text if "text" in modalities else "") and numpy.array_equal(heard, wanted)
        parts = {"text": bool(output.text), "audio": output.audio is not None and len(output.audio) > 0}
        return [name for name, there in parts.items() if there] == [name for name in parts if name in modalities]


async def one(client: AsyncOmniClient, chance: random.Random, ends: Ends, load: Load, *, whole: bool) -> None:
    """Run a request that completes or, unless it must be `whole`, is aborted on its way or has little time."""
    text = "".join(chance.choices(LETTERS, k=chance.randrange(1, 40)))
    kind = "whole" if whole else chance.choice(("whole", "whole", "abort", "deadline"))
    timeout = chance.uniform(0.001, 0.3) if kind == "deadline" else ENOUGH_SECONDS
    modalities = chance.choice((["text"], ["audio"], ["text", "audio"]))
    expected = {"abort": Aborted, "deadline": DeadlineExceeded}.get(kind, ())
    try:
        stream = await client.submit(text, modalities=modalities, params=load.params(chance), timeout=timeout)
        if kind == "abort":
            await asyncio.sleep(chance.uniform(0, 0.2))
            await stream.abort()
        async with asyncio.timeout(2 * ENOUGH_SECONDS):
            output = await stream.result()
        ends["finished" if load.is_answer(text, modalities, output) else "wrong answer"] += 1
    except TimeoutError:
        ends["no end"] += 1
    except OmniError as error:
        ends[error.code.value if isinstance(error, expected) else f"unexpected {error.code.value}"] += 1


async def one_over_http(client: httpx.AsyncClient, chance: random.Random, ends: Ends) -> None:
    """Ask for a text over HTTP, half of the time with a sound beside it, until it is answered."""
    text = "".join(chance.choices(LETTERS, k=chance.randrange(1, 40)))
    content: list[dict] = [{"type": "text", "text": text}]
    if chance.random() < 0.5:
        content.append({"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}})
    body = {"model": "echo", "messages": [{"role": "user", "content": content}]}
    said = "connection"
    for attempt in range(HTTP_TRIES):
        with contextlib.suppress(httpx.TransportError):
            answer = await client.post("/v1/chat/completions", json=body)
            if answer.status_code == 200:
                good = answer.json()["choices"][0]["message"]["content"] == text
                ends["finished" if good else "wrong answer"] += 1
                return
            said = answer.json()["error"]["code"]
            if answer.status_code < 429:
                break
        await asyncio.sleep(2**attempt * chance.uniform(0.5, 1))
    ends[f"unexpected {said}"] += 1


class Soak:
    """Counts what the clients of one pipeline got. The slow client has a thread, and so a loop, of its own."""

    def __init__(self, launcher: EchoLauncher, load: Load, options: argparse.Namespace) -> None:
        self._launcher = launcher
        self._load = load
        self._options = options
        self._chance = random.Random(options.seed)
        self._of_client: dict[bool, Ends] = {False: collections.Counter(), True: collections.Counter()}  # by `slow`
        self.losses = Losses(launcher, self._chance) if options.any_process else None
        self.killed = 0

    @property
    def ends(self) -> Ends:
        return self._of_client[False] + self._of_client[True]

    async def run(self, count: int) -> None:
        """Run `count` requests, and wait until all stages are back."""
        slow = round(count * self._options.slow)
        killing = asyncio.create_task(self.losses.go_on() if self.losses else self._kill_stages())
        seed = self._chance.random()
        await asyncio.gather(
            self._client(count - slow, random.Random(seed), slow=False),
            asyncio.to_thread(lambda: asyncio.run(self._client(slow, random.Random(-seed), slow=True))),
        )
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        await asyncio.to_thread(until, self._healthy, 30, "all stages are back")
        await asyncio.to_thread(self._launcher.wait_idle, 10)

    def _healthy(self) -> bool:
        with contextlib.suppress(OmniError):  # there may be no coordinator for a while
            return self._launcher.describe().healthy
        return False

    async def _client(self, count: int, chance: random.Random, *, slow: bool) -> None:
        slots = asyncio.Semaphore(self._options.concurrency)
        ends, seconds = self._of_client[slow], 60 * self._options.minutes / self._options.readings
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def limited(number: int) -> None:
            await asyncio.sleep(began + seconds * number / count - loop.time())
            async with slots:
                if self.losses and chance.random() < HTTP_SHARE:
                    await one_over_http(web, chance, ends)
                else:
                    await one(client, chance, ends, self._load, whole=self.losses is not None)

        async def pause() -> None:
            while slow:
                await asyncio.sleep(0.1)
                time.sleep(SLOW_SECONDS)  # noqa: ASYNC251 - this loop's client reads nothing meanwhile

        async with (
            AsyncOmniClient(self._launcher.endpoint) as client,
            httpx.AsyncClient(base_url=self._options.url, timeout=2 * ENOUGH_SECONDS) as web,
        ):
            pausing = asyncio.create_task(pause())
            await asyncio.gather(*(limited(number) for number in range(count)))
            pausing.cancel()

    async def _kill_stages(self) -> None:
        """Kill a stage whenever a certain number of requests has ended."""
        async with AsyncOmniClient(self._launcher.endpoint) as client:
            while True:
                await asyncio.sleep(0.02)
                if self.ends.total() * self._options.kills < self.killed + 0.5:
                    continue
                ready = [stage for stage in (await client.describe()).stages if stage.state == "ready"]
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(self._chance.choice(ready).pid).kill()
                    self.killed += 1


def memory(launcher: EchoLauncher, *, resident: bool) -> dict[str, int]:
    """Bytes of each process, without its arena, of which more or less is touched as blocks are reused.

    Args:
        resident: count what a process shares, too. One that is forked from a large one gets copies of that one's pages
            for a long time, whenever it writes to them, so that its private bytes grow and what it uses does not.
    """
    stages = [stage for stage in launcher.describe().stages if stage.counts.get("total_runs", 0) >= WARM]
    titles = {title: pid for pid, title in processes_of(launcher.folder).items()}
    pids = {stage.stage: stage.pid for stage in stages} | {"launcher": launcher.process.pid}
    pids |= {title.split()[0]: pid for title, pid in titles.items() if title.startswith(("omni:coord", "omni:http"))}
    sizes = {}
    for name, pid in pids.items():
        maps = psutil.Process(pid).memory_maps(grouped=False)
        own = [each for each in maps if "memfd:" not in each.path]
        sizes[name] = sum(each.rss if resident else each.private_clean + each.private_dirty for each in own)
    return sizes


def growth(sizes: Mapping[int, int]) -> float:
    """Bytes per 1,000 requests by which a process grows once it is warm.

    Args:
        sizes: bytes by the number of requests before the reading; at least `FEWEST_READINGS` of them.
    """
    warm = sorted(sizes.items())[len(sizes) // 4 :]
    part = len(warm) // 3
    (began, small), (ended, large) = (
        [statistics.median(values) for values in zip(*third, strict=True)] for third in (warm[:part], warm[-part:])
    )
    return 1000 * (large - small) / (ended - began)


def failures_of(soak: Soak, readings: Mapping[int, dict[str, int]], options: argparse.Namespace) -> list[str]:
    """Say what must not be, and print what was."""
    failures = []
    for process in sorted({name for reading in readings.values() for name in reading}):
        sizes = {count: reading[process] for count, reading in readings.items() if process in reading}
        listed = ", ".join(f"{size / MEBIBYTE:.0f}" for size in sizes.values())
        if len(sizes) < FEWEST_READINGS:
            print(f"memory of {process}: {listed} MiB; too few readings to judge")
            continue
        rate = growth(sizes) / MEBIBYTE
        print(f"memory of {process}: {listed} MiB; {rate:+.1f} MiB per 1,000 requests once warm")
        if rate > options.growth:
            failures.append(f"{process} grows")
    ends = soak.ends
    lost = {end: count for end, count in ends.items() if end.startswith("unexpected ")}
    if sum(lost.values()) > (1 - ANSWERED if soak.killed else 0) * (ends["finished"] + sum(lost.values())):
        failures.append(f"too many failed: {lost}")
    failures += [end for end in ("wrong answer", "no end") if ends[end]]
    if ends.total() != options.requests:
        failures.append("not every request ended")
    return failures


def main(options: argparse.Namespace) -> int:
    failures = []
    os.environ |= LIBRARIES
    options.url = f"http://127.0.0.1:{free_port()}"
    http = ["--http", options.url.removeprefix("http://")] if options.any_process else []
    with tempfile.TemporaryDirectory(prefix="sk-", dir="/tmp") as name:
        launcher = EchoLauncher(Path(name), configuration(options), *http).wait_ready(START_SECONDS)
        try:
            load = Load(configuration(options), echoes=options.config is None)
            soak, readings, began = Soak(launcher, load, options), {}, time.monotonic()
            for part in range(options.readings):
                begin, end = (options.requests * number // options.readings for number in (part, part + 1))
                asyncio.run(soak.run(end - begin))
                readings[end] = memory(launcher, resident=options.config is not None)
            print(f"{options.requests} requests in {time.monotonic() - began:.0f} s: {dict(soak.ends)}")
            if soak.losses:
                print(f"{soak.losses.counts.total()} processes hit: {dict(sorted(soak.losses.counts.items()))}")
            else:
                print(f"{soak.killed} stages killed, {launcher.describe().counts['replays']} replays; nothing is held")
            failures = failures_of(soak, readings, options)
            shared = shared_memory_of(processes_of(launcher.folder))
            stopped = [pid for pid in processes_of(launcher.folder) if pid != launcher.process.pid]
            if launcher.end() != 0:
                failures.append("the pipeline did not end well")
            for pid in stopped:  # a decoder that was stopped while it started, before it asked to die with its parent
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).resume()
            assert_nothing_left(launcher.folder, shared=shared)
        finally:
            if launcher.process.poll() is None:
                launcher.process.kill()
    print("failed: " + ", ".join(failures) if failures else "good")
    return 1 if failures else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--config", type=Path, help="YAML of a model, in place of the echo stages")
    parser.add_argument("--model", type=Path, help="folder of the checkpoint, with --config")
    parser.add_argument("--kills", type=float, default=0.01, help="kills of stages per request")
    parser.add_argument("--any-process", action="store_true", help="hit any process, not only stages")
    parser.add_argument("--minutes", type=float, default=0.0, help="over which the requests are spread")
    parser.add_argument("--slow", type=float, default=0.1, help="share of the requests of the slow client")
    parser.add_argument("--concurrency", type=int, default=64, help="requests at a time, of each of the two clients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readings", type=int, default=20)
    parser.add_argument("--growth", type=float, default=2.0, help="MiB per 1,000 requests; more for short runs")
    given = parser.parse_args()
    if (given.config is None) != (given.model is None):
        parser.error("--config and --model go together")
    sys.exit(main(given))
