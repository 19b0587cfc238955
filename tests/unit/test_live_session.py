"""What a Live session makes of a client's events and of a realtime session's, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from omni_actors.http_server.realtime import config
from omni_actors.http_server.realtime.config import ServerVad, SessionConfig
from omni_actors.http_server.realtime.formats import RATE, WireFormat
from omni_actors.http_server.realtime.live import DELEGATE, PIECE_SECONDS, LiveSession
from omni_actors.http_server.realtime.live_events import LiveEvent, LiveFields, StartLive
from omni_actors.http_server.realtime.requests import Outbox
from omni_actors.http_server.realtime.session import Ask, Instructions, RealtimeSession
from omni_actors.http_server.realtime.turns import SpeechWindow
from omni_actors.protocol.payloads import ToolCallPiece, WordTime
from tests.support.realtime import PIPELINE, WINDOW
from tests.support.waiting import eventually

CALL = [ToolCallPiece(0, "call_1", DELEGATE.name, arguments="{}")]


class LiveTalk:
    """A session with its Live API, and what it asked the pipeline."""

    def __init__(self) -> None:
        first = SessionConfig(
            model="echo", output="audio", turn_detection=ServerVad(silence_duration_ms=64), tools=[DELEGATE]
        )
        called = msgspec.structs.replace(PIPELINE, called=True)
        self.session = RealtimeSession(first, called, expires=0)
        self.live = LiveSession(StartLive(session=LiveFields(model="echo")), WireFormat(), delegates=True)
        self.asked: list[Ask] = []
        self.spoken: list[str] = []  # ids of items
        self.outbox = Outbox(self.sent, 1.0, None, self.live.told)
        self.events: list[dict[str, Any]] = []
        self._position = 0
        self.live.begin(self.outbox, lambda event: self.take(self.session.receive(event)), lambda _: None)
        self.take(self.session.opened())

    async def sent(self, text: str) -> None:
        self.events.append(json.loads(text))

    def take(self, instructions: Instructions) -> None:
        for instruction in instructions:
            if isinstance(instruction, Ask):
                self.asked += [] if instruction.early else [instruction]  # an early one is asked for again
            elif isinstance(instruction, dict) and not self.live.speaker.take(instruction):
                self.outbox.put(instruction)
                if instruction["type"] == "response.output_item.done":
                    self.spoken.append(instruction["item"]["id"])

    def send(self, kind: str, **fields: Any) -> None:
        event = self.live.meant(config.parse(msgspec.json.encode({"type": kind, **fields}), LiveEvent))
        if event is not None:
            self.take(self.session.receive(event))

    def hear(self, probability: float, windows: int = 4) -> None:
        """Takes sound of which a detector says this."""
        self.take(self.session.receive(config.AppendAudio(audio=bytes(2 * WINDOW * windows))))
        found = []
        for _ in range(windows):
            found.append(SpeechWindow(self._position, self._position + WINDOW, probability))
            self._position += WINDOW
        self.take(self.session.detect(found))

    def answer(self, text: str, calls: Sequence[ToolCallPiece] = ()) -> None:
        """Gives the answer that was asked for last."""
        response = self.asked[-1].response_id
        self.take(self.session.text(response, text, calls))
        self.take(self.session.sound(response, bytes(RATE)))
        self.take(self.session.answered(response, {}, cut=False))

    async def event(self, kind: str) -> dict[str, Any]:
        """The first event of a kind that the client gets."""
        await eventually(lambda: any(event["type"] == kind for event in self.events))
        return next(event for event in self.events if event["type"] == kind)

    def said(self) -> list[str]:
        """The pieces of the transcript that the client has."""
        return [event["delta"] for event in self.events if event["type"] == "session.output_transcript.delta"]

    @property
    def prompt(self) -> list[tuple[str, Any]]:
        """Role and text of each message of the newest question; none of sound."""
        found = [(message["role"], message["content"]) for message in self.asked[-1].messages]
        return [(role, text if isinstance(text, str) else text[0].get("text")) for role, text in found]


@pytest.fixture
async def talk() -> AsyncIterator[LiveTalk]:
    made = LiveTalk()
    writer = asyncio.create_task(made.outbox.write())
    yield made
    writer.cancel()


async def test_the_transcript_comes_when_its_words_are_said(talk: LiveTalk) -> None:
    talk.send("session.commentary.append", delegation_id=None, content="Count.")
    talk.answer("one two three four")  # in half a second
    item_id = talk.spoken[-1]
    ends = {"one": 0.05, "two": 0.35, "three": 0.35, "four": 0.5}
    text = " ".join(ends)
    talk.live.speaker.timed(item_id, [WordTime(word, 0.0, end, text.index(word)) for word, end in ends.items()])
    player = asyncio.create_task(talk.live.play())
    await eventually(lambda: "".join(talk.said()) == text, 10, lambda: str(talk.said()))
    player.cancel()
    assert talk.said() == ["one", " two three", " four"]


async def delegation_of(talk: LiveTalk) -> str:
    """Has the model delegate; returns the id."""
    talk.send("session.commentary.append", delegation_id=None, content="Ask.")
    talk.answer("Wait.", CALL)
    return str((await talk.event("session.delegation.created"))["delegation"]["id"])


async def test_the_first_that_the_client_says_of_a_delegation_is_the_result_of_the_call(talk: LiveTalk) -> None:
    own = {"delegation_id": await delegation_of(talk)}
    talk.send("session.instructions.append", **own, content="Be kind.")
    talk.send("session.thinking.append", **own, content="14 degrees")
    assert len(talk.asked) == 1, "what is not to be said is not answered"
    talk.send("session.commentary.append", **own, content="It rains.")
    told = [("system", "Be kind."), ("tool", "14 degrees"), ("system", "It rains.")]
    assert talk.prompt == [("system", "Ask."), ("assistant", "Wait."), *told]
    assert talk.asked[-1].messages[1]["tool_calls"][0]["id"] == talk.asked[-1].messages[3]["tool_call_id"] == "call_1"


async def test_what_is_told_while_the_user_speaks_is_answered_with_the_turn(talk: LiveTalk) -> None:
    talk.hear(0.9)
    talk.send("session.commentary.append", delegation_id=None, content="It rains.")
    assert not talk.asked
    talk.hear(0.0)
    assert talk.prompt == [("system", "It rains."), ("user", None)]
    talk.answer("Yes.")
    assert len(talk.asked) == 1


async def test_a_turn_that_interrupts_is_answered_once_with_what_was_told_before(talk: LiveTalk) -> None:
    talk.send("session.commentary.append", delegation_id=None, content="One.")
    talk.send("session.commentary.append", delegation_id=None, content="Two.")
    talk.hear(0.9)
    assert len(talk.asked) == 1
    talk.hear(0.0)
    assert len(talk.asked) == 2
    assert talk.prompt == [("system", "One."), ("system", "Two."), ("user", None)]


async def test_nothing_comes_after_the_end_of_a_session(talk: LiveTalk) -> None:
    talk.send("session.commentary.append", delegation_id=None, content="Count.")
    talk.live.close("close_requested")
    talk.answer("one two three four")  # that was on its way
    player = asyncio.create_task(talk.live.play())
    assert (await talk.event("session.closed"))["reason"] == "close_requested"
    await asyncio.sleep(3 * PIECE_SECONDS)
    player.cancel()
    assert talk.events[-1]["type"] == "session.closed"
