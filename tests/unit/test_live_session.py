"""What a Live session makes of a client's events and of a realtime session's, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from omni_actors.http_server.realtime import config
from omni_actors.http_server.realtime.config import ServerVad
from omni_actors.http_server.realtime.formats import RATE, WireFormat
from omni_actors.http_server.realtime.live import DELEGATE, LiveSession
from omni_actors.http_server.realtime.live_events import LiveEvent, LiveFields, StartLive
from omni_actors.http_server.realtime.requests import Outbox
from omni_actors.http_server.realtime.session import Instructions
from omni_actors.protocol.payloads import ToolCallPiece, WordTime
from tests.support.realtime import CALLED, Talk
from tests.support.waiting import eventually


class LiveTalk(Talk):
    """A session with its Live API."""

    def __init__(self) -> None:
        self.live = LiveSession(StartLive(session=LiveFields(model="echo")), WireFormat(), delegates=True)
        self.outbox = Outbox(self.sent, 1.0, None, self.live.told)
        self.told: list[dict[str, Any]] = []  # events of the Live API
        self.live.begin(self.outbox, lambda event: self.take(self.session.receive(event)), lambda _: None)
        super().__init__(CALLED, vad=ServerVad(silence_duration_ms=64), tools=[DELEGATE])

    async def sent(self, text: str) -> None:
        self.told.append(json.loads(text))

    def take(self, instructions: Instructions) -> list[dict[str, Any]]:
        events = super().take(instructions)
        for instruction in instructions:
            if isinstance(instruction, dict) and not self.live.speaker.take(instruction):
                self.outbox.put(instruction)
        return events

    def tell(self, kind: str, **fields: Any) -> None:
        event = self.live.meant(config.parse(msgspec.json.encode({"type": kind, **fields}), LiveEvent))
        if event is not None:
            self.take(self.session.receive(event))

    def give(self, text: str, calls: Sequence[ToolCallPiece] = ()) -> None:
        """Gives the answer that was asked for last."""
        response = self.asked[-1].response_id
        self.take(self.session.text(response, text, calls))
        self.take(self.session.sound(response, bytes(RATE)))
        self.take(self.session.answered(response, {}, cut=False))

    def said(self) -> list[str]:
        """The pieces of the transcript that the client has."""
        return [event["delta"] for event in self.told if event["type"] == "session.output_transcript.delta"]

    @property
    def answers(self) -> int:
        """How many were asked for; an early one is asked for again."""
        return sum(not ask.early for ask in self.asked)


@pytest.fixture
async def talk() -> AsyncIterator[LiveTalk]:
    made = LiveTalk()
    writer = asyncio.create_task(made.outbox.write())
    yield made
    writer.cancel()


async def test_the_transcript_comes_when_its_words_are_said(talk: LiveTalk) -> None:
    talk.tell("session.commentary.append", delegation_id=None, content="Count.")
    talk.give("one two three four")  # in half a second
    (item_id,) = [event["item"]["id"] for event in talk.events if event["type"] == "response.output_item.done"]
    ends = {"one": 0.05, "two": 0.35, "three": 0.35, "four": 0.5}
    text = " ".join(ends)
    talk.live.speaker.timed(item_id, [WordTime(word, 0.0, end, text.index(word)) for word, end in ends.items()])
    player = asyncio.create_task(talk.live.play())
    await eventually(lambda: "".join(talk.said()) == text, 10, lambda: str(talk.said()))
    player.cancel()
    assert talk.said() == ["one", " two three", " four"]


async def test_a_turn_that_interrupts_is_answered_once_with_what_was_told_before(talk: LiveTalk) -> None:
    talk.tell("session.commentary.append", delegation_id=None, content="One.")
    talk.tell("session.commentary.append", delegation_id=None, content="Two.")
    talk.hear(0.9, 4)
    assert talk.answers == 1
    talk.hear(0.0, 4)
    assert talk.answers == 2
    assert talk.prompt() == [("system", "One."), ("system", "Two."), ("user", "0.16 s")]
