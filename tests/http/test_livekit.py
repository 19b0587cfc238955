"""An agent of livekit-agents, unchanged, with its plugin for OpenAI's realtime API and for the Live API."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy
from livekit import rtc
from livekit.agents import Agent, AgentSession, ConversationItemAddedEvent, ErrorEvent, function_tool
from livekit.agents.llm import DuplexModel, RealtimeModel
from livekit.agents.voice import io
from livekit.plugins import openai

from omni_actors.http_server.realtime.formats import RATE
from tests.support.live import CONVERSATION, check_live_conversation
from tests.support.realtime import INSTRUCTIONS, SILENCE, check_conversation, interruptions, speech
from tests.support.servers import HttpPipeline
from tests.support.waiting import eventually

PIECE = 2400  # samples of one frame, 100 ms


class Microphone(io.AudioInput):
    def __init__(self) -> None:
        super().__init__(label="microphone")
        self._frames: asyncio.Queue[rtc.AudioFrame] = asyncio.Queue()
        self.always_open = False

    async def __anext__(self) -> rtc.AudioFrame:
        if not self.always_open:
            return await self._frames.get()
        try:
            async with asyncio.timeout(PIECE / RATE):
                return await self._frames.get()
        except TimeoutError:
            return rtc.AudioFrame(bytes(2 * PIECE), RATE, 1, PIECE)

    def hear(self, *sounds: numpy.ndarray) -> None:
        samples = numpy.concatenate(sounds)
        for start in range(0, len(samples), PIECE):
            piece = samples[start : start + PIECE]
            self._frames.put_nowait(rtc.AudioFrame(piece.tobytes(), RATE, 1, len(piece)))


class Loudspeaker(io.AudioOutput):
    """Plays in real time, for nobody to hear."""

    def __init__(self) -> None:
        capabilities = io.AudioOutputCapabilities(pause=False)
        super().__init__(label="loudspeaker", capabilities=capabilities, sample_rate=RATE)
        self._seconds = 0.0  # of the answer that is played
        self._began = 0.0
        self._end: asyncio.TimerHandle | None = None
        self.playing = False

    @property
    def played(self) -> float:
        """Seconds of the answer that is played."""
        return min(self._seconds, time.monotonic() - self._began) if self.playing else 0.0

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if not self.playing:
            self.playing, self._seconds, self._began = True, 0.0, time.monotonic()
            self.on_playback_started(created_at=time.time())
        self._seconds += frame.duration

    def flush(self) -> None:
        super().flush()
        if self.playing and self._end is None:
            left = max(0.0, self._began + self._seconds - time.monotonic())
            self._end = asyncio.get_running_loop().call_later(left, self._finish, False)

    def clear_buffer(self) -> None:
        if self.playing:
            self._finish(True)

    def _finish(self, interrupted: bool) -> None:
        if self._end is not None:
            self._end.cancel()
        played = self.played
        self._end, self.playing = None, False
        self.on_playback_finished(playback_position=played, interrupted=interrupted)


class Conversation:
    def __init__(self, session: AgentSession) -> None:
        self.microphone, self.loudspeaker = Microphone(), Loudspeaker()
        session.input.audio, session.output.audio = self.microphone, self.loudspeaker
        self.texts: dict[str, list[str]] = {"user": [], "assistant": []}
        self.errors: list[ErrorEvent] = []
        session.on("conversation_item_added", self._added)
        session.on("error", self.errors.append)

    def _added(self, event: ConversationItemAddedEvent) -> None:
        if event.item.type == "message":
            self.texts[event.item.role].append(event.item.text_content or "")

    async def has(self, user: int, assistant: int) -> None:
        """Wait until so many turns have been written down, and so many answers played."""

        def enough() -> bool:
            assert not self.errors, self.errors
            return len(self.texts["user"]) >= user and len(self.texts["assistant"]) >= assistant

        await eventually(enough, 20, lambda: f"{user} turns and {assistant} answers: {self.texts}")


@asynccontextmanager
async def conversation(model: RealtimeModel | DuplexModel, agent: Agent) -> AsyncIterator[Conversation]:
    session = AgentSession(llm=model, aec_warmup_duration=None)  # else it hears nothing for 3 s: here is no echo
    talk = Conversation(session)
    try:
        await session.start(agent)
        yield talk
        assert not talk.errors, talk.errors
    finally:
        await session.aclose()
        await model.aclose()


async def test_livekit_holds_a_conversation_and_interrupts_it(talkative: HttpPipeline) -> None:
    before = interruptions(talkative.url)
    model = openai.realtime.RealtimeModel(base_url=f"{talkative.url}/v1", api_key="none")  # with all its defaults
    async with conversation(model, Agent(instructions=INSTRUCTIONS)) as talk:
        talk.microphone.hear(SILENCE, speech(1.0), SILENCE)
        await talk.has(1, 1)
        talk.microphone.hear(speech(1.0), SILENCE)
        await eventually(lambda: talk.loudspeaker.played > 0.4, 20, "the second answer")
        talk.microphone.hear(speech(1.0))
        await talk.has(1, 2)
        talk.microphone.hear(SILENCE)
        await talk.has(3, 3)
        check_conversation(talk.texts["assistant"], talk.texts["user"])
    assert interruptions(talkative.url) == before + 1


class Forecaster(Agent):
    def __init__(self, instructions: str) -> None:
        super().__init__(instructions=instructions)
        self.asked: list[str] = []

    @function_tool
    async def weather(self, city: str) -> str:
        """Say how the weather is in a city."""
        self.asked.append(city)
        return "14 degrees."


async def test_livekit_holds_a_live_conversation_and_does_what_is_delegated(scripted: HttpPipeline) -> None:
    agent = Forecaster(CONVERSATION)
    model = openai.realtime.GPTLiveModel(base_url=f"{scripted.url}/v1", api_key="none")
    async with conversation(model, agent) as talk:
        talk.microphone.always_open = True

        async def said(pattern: str) -> None:
            texts = talk.texts["assistant"]
            await eventually(lambda: re.fullmatch(pattern, "".join(texts)), 20, lambda: f"{pattern}: {talk.texts}")

        talk.microphone.hear(speech(1.0), SILENCE)
        await said("Hello.")
        talk.microphone.hear(speech(1.0), SILENCE)
        await eventually(lambda: talk.loudspeaker.played > 0.4, 20, "the second answer")
        talk.microphone.hear(speech(1.0), SILENCE)
        await said("Hello.one .*Let me look.14 degrees.")
        talk.microphone.hear(speech(1.0), SILENCE)
        await eventually(lambda: talk.loudspeaker.played > 0.4, 20, "the fourth answer")
        talk.microphone.hear(speech(1.0), SILENCE)
        await said("Hello.one .*Let me look.14 degrees.one .*Bye.")
        check_live_conversation("".join(talk.texts["assistant"]))
        await eventually(lambda: len(talk.texts["user"]) == 5, 20, lambda: str(talk.texts["user"]))
        assert agent.asked == ["Kiel"]
