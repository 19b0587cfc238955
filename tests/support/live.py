"""A client of the Live API on a bare socket: what it hears, and every event held against the `openai` package."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy
from openai.types.live import ConnectServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedOK

from omni_actors.http_server.realtime.formats import RATE
from omni_actors.http_server.realtime.live_sessions import PATH
from tests.support.realtime import extra_fields
from tests.support.scripted import NEXT, SHOW, called
from tests.support.waiting import eventually

OPENAI = TypeAdapter(ConnectServerEvent)
EXTRA = {"capabilities"}  # which clients know nothing of
PIECE = RATE // 10  # samples that are said at a time
PAUSE = numpy.zeros(RATE * 7 // 10, "<i2")  # ends a turn


def conforms(event: dict[str, Any]) -> None:
    """Fails unless the event is what the `openai` package declares."""
    extra = set(extra_fields(OPENAI.validate_python(event)))
    assert extra <= EXTRA, f"{event['type']} has {extra - EXTRA}"


class LiveClient:
    """One session, and what came of it: the events, and apart from them the sound."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []
        self.pcm = b""
        self.ahead = 0.0  # seconds of sound that came before they were due, at most
        self._began = time.monotonic()

    async def listen(self) -> None:
        async for text in self.socket:
            event = json.loads(text)
            conforms(event)
            if event["type"] == "session.output_audio.delta":
                self.pcm += base64.b64decode(event["delta"])
                self.ahead = max(self.ahead, len(self.pcm) / 2 / RATE - (time.monotonic() - self._began))
            else:
                self.events.append(event)

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def append(self, sound: bytes) -> None:
        await self.send("session.input_audio.append", audio=base64.b64encode(sound).decode())

    async def say(self, *sounds: numpy.ndarray) -> None:
        """Speak i16 at `RATE`, all of it at once."""
        samples = numpy.concatenate(sounds)
        for start in range(0, len(samples), PIECE):
            await self.append(samples[start : start + PIECE].tobytes())

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    def work(self, kind: str) -> list[dict[str, Any]]:
        """Events of the backend."""
        inner = [event["event"] for event in self.of_kind("response.event")]
        return [event for event in inner if event["type"] == kind]

    @property
    def said(self) -> str:
        """The transcript of all answers, as far as they were heard."""
        return "".join(event["delta"] for event in self.of_kind("session.output_transcript.delta"))

    @property
    def heard(self) -> str:
        """What was written down of all turns of the user."""
        return "".join(event["delta"] for event in self.of_kind("session.input_transcript.delta"))

    async def until(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Wait for an event; returns the last one of its kind."""
        await eventually(lambda: len(self.of_kind(kind)) >= count, 15, lambda: f"{kind}: {self.events}")
        return self.of_kind(kind)[-1]

    async def until_said(self, text: str) -> None:
        await eventually(lambda: text in self.said, 15, lambda: f"{text!r} in {self.said!r}: {self.events}")


@asynccontextmanager
async def live_session(url: str, fork_of: str | None = None, **session: Any) -> AsyncIterator[LiveClient]:
    """A session that has begun, or the fork of one; closed at the end."""
    path = PATH if fork_of is None else f"{PATH}/{fork_of}/fork"
    own = {"model": "gpt-live-1"} if fork_of is None else {}
    async with connect(f"{url.replace('http', 'ws', 1)}{path}", proxy=None) as socket:
        client = LiveClient(socket)
        ear = asyncio.create_task(client.listen())
        try:
            await client.send("session.start", event_id="the start", session={**own, **session})
            await client.until("session.started")
            yield client
            with contextlib.suppress(ConnectionClosedOK):  # another connection has closed the session
                await client.send("session.close")
            await ear
            assert client.events[-1]["type"] == "session.closed"
            assert socket.close_code == 1000
        finally:
            ear.cancel()


async def prompt(client: LiveClient) -> str:
    """The prompt that the model gets, by work of the backend."""
    content = [{"type": "input_text", "text": SHOW}]
    await client.send("response.item.create", item={"type": "message", "role": "user", "content": content})
    before = len(client.work("response.output_item.done"))
    await client.send("response.create")
    await eventually(lambda: len(client.work("response.output_item.done")) > before)
    (part,) = client.work("response.output_item.done")[-1]["item"]["content"]
    return str(part["text"])


# A conversation of five turns; the third and the fifth interrupt an answer, and the third one delegates.
LONG = "one two three four five six seven eight nine ten " * 4  # 4 s
LOOKS = f"Let me look.{called('weather', city='Kiel')}"
CONVERSATION = NEXT.join(("Hello.", LONG, LOOKS, LONG, "Bye."))


def check_live_conversation(answers: str) -> None:
    """Fails unless these are the answers of such a conversation, as far as they were heard."""
    found = re.fullmatch(r"Hello\.(one .*)Let me look\.14 degrees\.(one .*)Bye\.", answers)
    assert found, answers
    for heard in found.groups():
        assert LONG.startswith(heard)
        assert len(heard) < len(LONG)
