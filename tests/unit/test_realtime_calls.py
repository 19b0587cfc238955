"""Sessions whose answers the server plays, and what a Live session makes of its client's events. Without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy
import pytest
from av import CodecContext, Packet

from omni_actors.http_server.realtime import config, webrtc
from omni_actors.http_server.realtime.config import Event, ServerVad, event
from omni_actors.http_server.realtime.formats import RATE, WireFormat
from omni_actors.http_server.realtime.live import DELEGATE, LiveSession
from omni_actors.http_server.realtime.live_events import LiveEvent, LiveFields, StartLive
from omni_actors.http_server.realtime.playing import AHEAD_SECONDS, Loudspeaker
from omni_actors.http_server.realtime.requests import Outbox
from omni_actors.http_server.realtime.session import Instructions, Silence
from omni_actors.http_server.realtime.webrtc import OPUS_CLOCK, OpusTrack
from omni_actors.protocol.payloads import ToolCallPiece, WordTime
from tests.support.realtime import CALLED, Talk, conforms, error_of
from tests.support.servers import tone
from tests.support.waiting import eventually

VAD = ServerVad(prefix_padding_ms=64, silence_duration_ms=160)


def plays() -> Talk:
    return Talk(CALLED, vad=VAD, audio_seconds=2.0)


def silences(talk: Talk) -> int:
    return sum(isinstance(instruction, Silence) for instruction in talk.instructions)


def test_only_where_the_server_plays_it_can_be_silenced() -> None:
    talk = plays()
    assert talk.send("output_audio_buffer.clear") == []
    talk.respond()
    talk.send("response.cancel")
    assert silences(talk) == 1, "what was made of a cancelled answer is heard"
    assert error_of(Talk().send("output_audio_buffer.clear"))["param"] == "type"


def test_the_newest_sound_of_an_open_microphone_is_kept() -> None:
    talk = Talk(CALLED, audio_seconds=1.0)
    for value in range(1, 31):
        talk.append(numpy.full(RATE // 10, value, "<i2").tobytes())
    talk.send("input_audio_buffer.commit")
    talk.respond()
    ((samples, _),) = [part["audio"] for part in talk.asked[-1].messages[0]["content"]]
    assert len(samples) == RATE
    assert set(samples) == set(range(21, 31))


def delta(response: str, pcm: bytes) -> Event:
    return event("response.output_audio.delta", response_id=response, item_id=f"item of {response}", delta=pcm)


def done(response: str, status: str = "completed") -> Event:
    return event("response.done", response={"id": response, "status": status})


class Told(list[tuple[str, str]]):
    """What a loudspeaker tells, as kind and response."""

    def __call__(self, given: Event) -> None:
        conforms(given)
        self.append((given["type"].rpartition(".")[2], given["response_id"]))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
async def speaker(told: Told) -> Loudspeaker:
    made = Loudspeaker()
    made.tell = told
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of packets, which stands still, so that no busy machine makes a pause; tests move it."""
    moved = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(webrtc, "time", SimpleNamespace(monotonic=lambda: moved.now))
    return moved


@pytest.fixture
async def track(speaker: Loudspeaker, clock: SimpleNamespace) -> OpusTrack:
    return OpusTrack(speaker)


async def played(track: OpusTrack, count: int) -> list[Packet]:
    return [await track.recv() for _ in range(count)]


async def test_answers_are_played_one_after_the_other(speaker: Loudspeaker, track: OpusTrack, told: Told) -> None:
    sound = (tone(0.05, RATE) * 32767).astype("<i2").tobytes()
    assert speaker.take(delta("a", sound))
    assert not speaker.take(done("a"))
    assert speaker.take(delta("b", sound[:1000]))
    packets = await played(track, 4)
    assert told == [("started", "a"), ("stopped", "a"), ("started", "b")]  # of b, 40 bytes wait for more
    assert [packet.pts - packets[0].pts for packet in packets] == [0, 960, 1920, 2880]
    decoder = CodecContext.create("libopus", "r")
    heard = numpy.concatenate([frame.to_ndarray()[0] for packet in packets for frame in decoder.decode(packet)])
    assert numpy.abs(heard[960:2400]).max() > 0.2
    speaker.take(done("b"))
    await played(track, 1)
    speaker.take(delta("c", sound))
    await played(track, 1)
    assert told[3:] == [("stopped", "b"), ("started", "c")]


async def test_after_a_pause_the_time_of_packets_goes_on(
    speaker: Loudspeaker, track: OpusTrack, clock: SimpleNamespace
) -> None:
    speaker.take(delta("a", bytes(1920)))
    (first,) = await played(track, 1)
    clock.now += 2.0
    (second,) = await played(track, 1)
    assert second.pts - first.pts == pytest.approx(2 * OPUS_CLOCK, abs=0.1 * OPUS_CLOCK)


async def test_what_was_not_played_is_dropped_and_said(speaker: Loudspeaker, track: OpusTrack, told: Told) -> None:
    speaker.take(delta("a", bytes(480)))
    speaker.take(done("a"))
    speaker.take(delta("b", bytes(48_000)))
    speaker.take(delta("c", bytes(48_000)))
    await played(track, 3)
    assert speaker.silence() == [("b", "item of b", 40), ("c", "item of c", 0)]
    assert speaker.size == 0
    assert speaker.silence() == []
    for response, status in (("d", "completed"), ("e", "cancelled")):  # the text of which goes on where its sound ends
        speaker.take(delta(response, bytes(960)))
        speaker.take(done(response, status))
    await played(track, 2)
    assert speaker.silence() == [("e", "item of e", 20)], "an answer that was cut short was not heard to its end"


async def test_no_more_of_an_answer_is_taken_than_can_wait(speaker: Loudspeaker, track: OpusTrack) -> None:
    speaker.take(delta("a", bytes(round(AHEAD_SECONDS * 2 * RATE))))
    await speaker.room()
    speaker.take(delta("a", bytes(960)))
    room = asyncio.create_task(speaker.room())
    await asyncio.sleep(0)
    assert not room.done()
    await played(track, 1)
    await room


class LiveTalk(Talk):
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
