"""Speech that waits for its turn, through real processes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import numpy
import psutil
import pytest

from omni_actors.cli import ctl
from omni_actors.client import AsyncOmniClient, Audio, RequestStream, Text
from omni_actors.errors import Overloaded
from omni_actors.protocol.messages import Operation
from omni_actors.telemetry import metrics as table
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.waiting import eventually

Launch = Callable[..., EchoLauncher]

LETTERS = "abcd"
SAMPLES = 12_000  # of a token: 0.5 s


async def read(stream: RequestStream, texts: list[str], sounds: list[float]) -> None:
    async for item in stream:
        if isinstance(item, Text):
            texts.append(item.text)
        elif isinstance(item, Audio):
            assert len(numpy.unique(item.samples)) == 1
            sounds.append(float(item.samples[0]) * 256)


async def test_as_many_are_spoken_as_the_vocoder_says_and_the_sound_of_others_comes_whole_when_it_has_its_turn(launch):
    """It makes 0.5 s of sound in 0.13 s, so its heartbeats say three listeners. Text waits for nothing."""
    data = chain()
    data["stages"][3]["engine"] = {"request_seconds": 0.13, "samples_per_token": SAMPLES}
    data["coordinator"] = {"speech_queue": 2, "speech_pace": 1.0, "heartbeat_timeout": 60, "heartbeat_interval": 0.05}
    for stage in data["stages"]:
        stage["stall_timeout"] = 60
    echo = launch(data).wait_ready()
    talker = psutil.Process(echo.pid_of("talker"))
    texts: list[list[str]] = [[] for _ in range(5)]
    sounds: list[list[float]] = [[] for _ in range(5)]
    async with AsyncOmniClient(echo.endpoint) as client:

        async def places() -> int:
            return (await client.operate(Operation.STATUS)).description.speech_places

        assert await places() == 0, "nobody waits until it is known what the vocoder makes"
        first = await client.submit(LETTERS * 4, modalities=["text", "audio"], timeout=60)
        assert len((await first.result()).text) == 4 * len(LETTERS)

        async def known() -> bool:
            return await places() == 3

        await eventually(known, 10, "a heartbeat of the vocoder")
        talker.send_signal(signal.SIGSTOP)  # until all has been looked at
        streams = [await client.submit(LETTERS, modalities=["text", "audio"], timeout=60) for _ in range(5)]
        reading = [asyncio.create_task(read(*parts)) for parts in zip(streams, texts, sounds, strict=True)]
        await eventually(lambda: ["".join(text) for text in texts] == [LETTERS] * 5, 20, "all texts")
        # The thinker has told the coordinator of all of them, and the talker of none.
        report = await client.operate(Operation.STATUS)
        shown = report.description
        assert (shown.speech_running, shown.speech_places) == (3, 3)
        assert shown.speech_waiting == 2
        assert "3 of 3 speaking, 2 waiting to" in ctl.render(report)
        refused = await client.submit(LETTERS, modalities=["text", "audio"], timeout=60)
        plain = await client.submit(LETTERS, modalities=["text"], timeout=60)
        assert (await plain.result()).text == LETTERS
        with pytest.raises(Overloaded, match="text alone"):
            await refused.result()
        talker.send_signal(signal.SIGCONT)
        await asyncio.gather(*reading)
        assert sounds == [[float(ord(letter)) for letter in LETTERS]] * 5
        metrics = await client.metrics()
    assert f"{table.SPEECH_WAIT.name}_count 6" in metrics
    assert f"{table.SPEECH_WAITING.name} 0" in metrics
