"""Speech from a text that is still being written, while the processes that make it die."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy
import psutil
import pytest

from omni_actors.client import AsyncOmniClient, Audio, Text
from omni_actors.client.streams import RequestStream
from omni_actors.errors import InvalidPayload, InvalidRequest
from tests.support.builders import chain
from tests.support.load import replicas, until_healthy
from tests.support.processes import coordinator_of

TEXT = "Those who speak while they think are heard sooner, and 4 words are enough to begin. "


def speaking_chain() -> dict[str, Any]:
    """One stage, which speaks: a sample for each character."""
    engine = {"samples_per_token": 1, "speech": {"text_in_parts": True}, "voices": []}
    talker = {"name": "talker", "kind": "echo", "outputs": ["audio"], "engine": engine}
    return {**chain(), "stages": [talker], "coordinator": {"heartbeat_interval": 0.05, "default_timeout": 120}}


async def test_what_a_stage_writes_is_spoken_while_it_writes(launch) -> None:
    made = speaking_chain()
    (talker,) = made["stages"]
    talker["inputs"] = {"from": "chat", "processor": "text2speech"}
    writer = {"name": "chat", "kind": "echo", "outputs": ["text"], "engine": {"step_seconds": 0.01}}
    made["stages"] = [writer, talker]
    launcher = launch(made).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client:
        assert (await client.describe()).speech is None, "it answers"
        items = [item async for item in await client.submit(TEXT, modalities=["text", "audio"])]
        sounds = [index for index, item in enumerate(items) if isinstance(item, Audio)]
        texts = [index for index, item in enumerate(items) if isinstance(item, Text)]
        assert sounds[0] < texts[len(texts) // 2]
        assert "".join(items[index].text for index in texts) == TEXT
        assert said([items[index].samples for index in sounds]) == TEXT.strip()
    launcher.wait_idle()


def said(samples: list[numpy.ndarray]) -> str:
    return bytes((numpy.concatenate(samples) * 256).round().astype(numpy.uint8)).decode()


async def heard_at_least(stream: RequestStream, samples: list[numpy.ndarray], count: int) -> None:
    while sum(map(len, samples)) < count:
        item = await anext(stream)
        assert isinstance(item, Audio)
        samples.append(item.samples)


async def test_speech_follows_its_text_and_outlives_its_stage_and_the_coordinator(launch, short_path) -> None:
    launcher = launch(speaking_chain()).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client, AsyncOmniClient(launcher.endpoint) as watcher:
        stream = await client.submit("", more_text=True, modalities=["audio"])
        samples: list[numpy.ndarray] = []
        written = ""

        async def write() -> None:
            """Send the text once, in two parts, and hear all of it but the last word."""
            nonlocal written
            await stream.append_text(TEXT[:31])
            await stream.append_text(TEXT[31:])
            written += TEXT
            await heard_at_least(stream, samples, len(written) - len("begin. "))

        await write()
        (pid,) = [status.pid for status in (await replicas(watcher)).values()]
        psutil.Process(pid).kill()
        await write()
        psutil.Process(coordinator_of(short_path)).kill()
        await stream.append_text(TEXT)  # nobody is there to take it
        written += TEXT
        await until_healthy(watcher)
        await write()
        await stream.end_text()
        async for item in stream:
            samples.append(item.samples)
        assert said(samples) == (TEXT * 4).strip()
        assert stream.usage["talker"].output_tokens == len(TEXT * 4) - 1
        with pytest.raises(InvalidPayload, match="one text can come in parts"):
            await client.submit([{"role": "assistant", "content": "Hello."}], more_text=True)
        nothing = await client.submit(" ", more_text=True, modalities=["audio"])
        await nothing.end_text()
        with pytest.raises(InvalidRequest, match="complete"):
            await nothing.append_text("x")
        assert (await nothing.result()).audio is None
        left = await client.submit("Wait ", more_text=True, modalities=["audio"])
        async with asyncio.timeout(60):
            await anext(left)
        await left.abort()
    launcher.wait_idle()
    assert launcher.end() == 0
