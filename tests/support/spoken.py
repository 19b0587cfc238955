"""Texts that are spoken by echo stages, and a client of the sessions that take them while they are written."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import numpy
from websockets.asyncio.client import ClientConnection, connect

from tests.support.waiting import PATIENCE

SENTENCES = ("The tide is full. ", "Dr. Pi has 3.14 boats! ", "Who rows? ")
WRITTEN = "".join(SENTENCES)
SPOKEN = "".join(sentence.strip() for sentence in SENTENCES)  # without the space between them, which nobody says


def said(pcm: bytes) -> str:
    """What the echo stages said, from its samples."""
    return bytes((numpy.frombuffer(pcm, "<i2") / 32767 * 256).round().astype(numpy.uint8)).decode()


def tokens(text: str) -> list[str]:
    """A text as a model writes it: a few characters at a time."""
    return [text[place : place + 3] for place in range(0, len(text), 3)]


class TextSocket:
    """A client that sends a text and hears it."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            await self.connection.send(json.dumps(message))

    async def append(self, texts: Iterable[str]) -> None:
        await self.send(*({"type": "input_text.append", "text": text} for text in texts))

    async def message(self) -> dict[str, Any]:
        async with asyncio.timeout(10 * PATIENCE):
            found: dict[str, Any] = json.loads(await self.connection.recv())
        return found

    async def heard(self, kind: str = "speech.audio.done") -> tuple[str, dict[str, Any]]:
        """What is said up to the first event of a kind, and that event."""
        pcm = b""
        while (event := await self.message())["type"] != kind:
            assert event["type"] == "speech.audio.delta", event
            pcm += base64.b64decode(event["audio"])
        return said(pcm), event


@asynccontextmanager
async def text_socket(url: str, path: str = "/v1/audio/speech/stream", **options: Any) -> AsyncIterator[TextSocket]:
    async with connect(f"{url.replace('http', 'ws', 1)}{path}", proxy=None, **options) as connection:
        yield TextSocket(connection)
