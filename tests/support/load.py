"""Many requests at once through a pipeline of echo stages, each with a check of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import string
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import psutil

from omni_actors.client import AsyncOmniClient, Audio, Text
from omni_actors.errors import OmniError
from omni_actors.protocol.messages import StageStatus
from tests.support.builders import chain
from tests.support.waiting import PATIENCE

SAMPLES = 480
STAGES = ("prompt", "thinker", "talker", "code2wav")
LETTERS = string.ascii_letters + string.digits


def disturbed_chain(step_seconds: float = 0.002, **stage: Any) -> dict[str, Any]:
    """The echo chain that restarts at once, where no stage counts as stuck, however busy the machine is."""
    data = chain()
    for item in data["stages"]:
        item |= {"engine": {"step_seconds": step_seconds, "row_width": 8}, "restart_backoff": 0.1}
        item |= {"stall_timeout": 60.0, **stage}
    data["coordinator"] = {"heartbeat_interval": 0.1, "heartbeat_timeout": 30.0}
    return data


def text_of(number: int) -> str:
    """All letters of a text differ from their neighbours: what is doubled, lost or swapped shows."""
    length = 12 + number % 17
    return "".join(LETTERS[(number + 7 * index) % len(LETTERS)] for index in range(length))


async def ask_and_check(client: AsyncOmniClient, text: str, **options: Any) -> int:
    """One request; text and audio must be an undisturbed run's, delta by delta. Returns the messages it took."""
    letters, levels, messages = [], [], 0
    stream = await client.submit(text, modalities=["text", "audio"], **{"timeout": 60, **options})
    async for item in stream:
        messages += 1
        if isinstance(item, Text):
            assert [item.text] == [chr(token) for token in item.token_ids], "a delta was cut"
            letters.append(item.text)
            assert text.startswith("".join(letters)), f"{text} became {letters}"
        elif isinstance(item, Audio):
            levels.append(item.samples)
    assert "".join(letters) == text
    expected = numpy.repeat(numpy.frombuffer(text.encode(), numpy.uint8) / 256, SAMPLES).astype(numpy.float32)
    assert numpy.array_equal(numpy.concatenate(levels), expected)
    assert len(levels) == len(text), "a chunk came twice or was cut"
    assert set(stream.usage) == set(STAGES)
    return messages


@dataclass
class Load:
    """`total` requests, `width` of them at a time; `at` runs something when a share of them is answered."""

    client: AsyncOmniClient
    total: int = 100
    width: int = 24
    answered: int = 0
    failures: list[str] = field(default_factory=list)

    async def run(self, at: dict[float, Callable[[], None]] | None = None) -> None:
        """Raises `AssertionError` if any answer is not what an undisturbed run gives."""
        numbers = iter(range(self.total))
        plan = sorted((at or {}).items())

        async def worker() -> None:
            for number in numbers:
                try:
                    await ask_and_check(self.client, text_of(number))
                except (OmniError, AssertionError) as error:
                    self.failures.append(f"{number}: {type(error).__name__}: {error}")
                self.answered += 1
                while plan and self.answered >= plan[0][0] * self.total:
                    plan.pop(0)[1]()

        await asyncio.gather(*(worker() for _ in range(self.width)))
        assert not plan
        assert not self.failures, self.failures[:5]
        assert self.answered == self.total


async def replicas(client: AsyncOmniClient) -> dict[str, StageStatus]:
    return {f"{item.stage}/{item.replica}": item for item in (await client.describe()).stages}


@dataclass
class Losses:
    """Sends signals to replicas and waits until each of them is back."""

    client: AsyncOmniClient
    recovered: int = 0
    noticed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first loss shows in a description."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _killed: set[int] = field(default_factory=set)

    def kill(self, name: str) -> None:
        """Kill the replica's process, or its next one if this was killed and nobody has noticed yet."""

        async def kill() -> None:
            async with asyncio.timeout(30 * PATIENCE):
                while not (pid := (await replicas(self.client))[name].pid) or pid in self._killed:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            self._killed.add(pid)
            psutil.Process(pid).kill()
            await self._follow(pid, name)

        self._tasks.append(asyncio.create_task(kill()))

    def hit(self, pid: int, name: str, number: signal.Signals) -> None:
        psutil.Process(pid).send_signal(number)
        self.follow(pid, name)

    def follow(self, pid: int, name: str) -> None:
        """Wait in the background for a loss that the test causes in another way."""
        self._tasks.append(asyncio.create_task(self._follow(pid, name)))

    async def _follow(self, pid: int, name: str) -> None:
        async with asyncio.timeout(30 * PATIENCE):
            while (status := (await replicas(self.client))[name]).state == "ready" and status.pid == pid:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            self.noticed.set()
            while (await replicas(self.client))[name].state != "ready":  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            self.recovered += 1

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)


@contextlib.asynccontextmanager
async def connected(endpoint: str) -> AsyncIterator[tuple[AsyncOmniClient, Losses]]:
    """A client for the load, and losses that another client follows."""
    async with AsyncOmniClient(endpoint) as client, AsyncOmniClient(endpoint) as watcher:
        yield client, Losses(watcher)


async def until_healthy(client: AsyncOmniClient, seconds: float = 10.0) -> None:
    """Wait until every stage is ready, also while there is no coordinator."""
    async with asyncio.timeout(seconds * PATIENCE):
        while True:
            with contextlib.suppress(OmniError):
                if (await client.describe(0.5 * PATIENCE)).healthy:
                    return
            await asyncio.sleep(0.02)


async def until_in_flight(client: AsyncOmniClient, requests: int) -> None:
    """Wait until so many requests are in flight at once."""
    async with asyncio.timeout(10 * PATIENCE):
        while (await client.describe()).in_flight < requests:  # noqa: ASYNC110 - the state is another process's
            await asyncio.sleep(0.01)


async def until_busy(client: AsyncOmniClient, *names: str) -> None:
    """Wait until each of these replicas holds a request."""
    left = set(names)
    async with asyncio.timeout(20 * PATIENCE):
        while left:
            left -= {name for name, item in (await replicas(client)).items() if item.in_flight}
            await asyncio.sleep(0.01)
