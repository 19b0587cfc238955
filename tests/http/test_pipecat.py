"""A second client of realtime sessions, unchanged: pipecat-ai with its service for OpenAI's realtime API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy
import pytest
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMRunFrame,
    TTSAudioRawFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime.events import (
    AudioConfiguration,
    AudioInput,
    InputAudioTranscription,
    SessionProperties,
    TurnDetection,
)
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.turns.user_turn_strategies import ExternalUserTurnStrategies
from pipecat.workers.runner import WorkerRunner

from omni_actors.http_server.realtime.config import RATE
from tests.support.realtime import speech
from tests.support.servers import HttpPipeline
from tests.support.waiting import eventually

pytestmark = pytest.mark.nightly

SILENCE = numpy.zeros(RATE, "<i2")
PIECE = 2400  # samples of one frame, 100 ms


class Loudspeaker(FrameProcessor):
    """Notes what comes out of the service."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        self.frames.append(frame)
        await self.push_frame(frame, direction)

    def of(self, kind: type[Frame]) -> list[Any]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def text(self) -> str:
        return "".join(frame.text for frame in self.of(TTSTextFrame))


class Voice:
    """A conversation that a program of pipecat's holds with a server."""

    def __init__(self, url: str, instructions: str, asked: str) -> None:
        heard = AudioInput(
            transcription=InputAudioTranscription(model="echo", language="en"),
            turn_detection=TurnDetection(silence_duration_ms=300),
        )
        service = OpenAIRealtimeLLMService(
            api_key="none",
            base_url=f"{url.replace('http', 'ws', 1)}/v1/realtime",
            settings=OpenAIRealtimeLLMService.Settings(
                model="echo",
                system_instruction=instructions,
                session_properties=SessionProperties(audio=AudioConfiguration(input=heard)),
            ),
        )
        self.context = LLMContext([{"role": "user", "content": asked}])
        # Those that the service recommends when it is connected; until then there would be a detector of pipecat's.
        by_server = LLMUserAggregatorParams(user_turn_strategies=ExternalUserTurnStrategies())
        user, assistant = LLMContextAggregatorPair(self.context, user_params=by_server)
        self.heard = Loudspeaker()
        self.worker = PipelineWorker(Pipeline([user, service, self.heard, assistant]), enable_rtvi=False)
        self.errors: list[ErrorFrame] = []

        @self.worker.event_handler("on_pipeline_error")
        async def failed(_: PipelineWorker, frame: ErrorFrame) -> None:
            self.errors.append(frame)

    async def ask(self) -> None:
        """Have the conversation so far answered."""
        await self.worker.queue_frame(LLMRunFrame())

    async def speak(self, samples: numpy.ndarray) -> None:
        for start in range(0, len(samples), PIECE):
            piece = samples[start : start + PIECE].tobytes()
            await self.worker.queue_frame(InputAudioRawFrame(audio=piece, sample_rate=RATE, num_channels=1))

    async def answers(self, count: int) -> None:
        """Wait until so many answers have ended."""

        def ended() -> bool:
            assert not self.errors, self.errors
            return len(self.heard.of(LLMFullResponseEndFrame)) >= count

        await eventually(ended, 10, lambda: f"{count} answers: {self.heard.frames}")


@asynccontextmanager
async def conversation(url: str, instructions: str = "hi", asked: str = "sea") -> AsyncIterator[Voice]:
    voice = Voice(url, instructions, asked)
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(voice.worker)
    running = asyncio.create_task(runner.run())
    try:
        yield voice
        assert not voice.errors, voice.errors
    finally:
        await runner.cancel()
        await running


async def test_pipecat_holds_a_spoken_turn(echo: HttpPipeline) -> None:
    """The echo stages answer with all texts of the conversation, 480 samples a letter."""
    async with conversation(echo.url) as voice:
        await voice.ask()
        await voice.answers(1)
        assert voice.heard.text() == "hisea"
        assert sum(len(frame.audio) for frame in voice.heard.of(TTSAudioRawFrame)) == 5 * 480 * 2

        voice.heard.frames.clear()
        await voice.speak(numpy.concatenate([SILENCE, speech(1.0), SILENCE]))
        await voice.answers(1)
        assert voice.heard.text() == "hiseahisea"
        assert voice.heard.of(TTSAudioRawFrame)


async def test_pipecat_interrupts_an_answer_by_speaking(slow: HttpPipeline) -> None:
    before = interruptions(slow.url)
    async with conversation(slow.url, asked="five " * 200) as voice:  # takes longer than this test waits
        await voice.ask()
        await eventually(lambda: voice.heard.text(), 10, "the transcript of the answer")
        await voice.speak(numpy.concatenate([speech(1.0), SILENCE]))
        await eventually(lambda: voice.heard.of(InterruptionFrame), 10, "the interruption")
        await voice.answers(1)
        assert len(voice.heard.text()) < 1000
        assert interruptions(slow.url) == before + 1
        voice.heard.frames.clear()
        await eventually(lambda: voice.heard.text(), 10, "the answer to what was said instead")


def interruptions(url: str) -> float:
    name = 'omni_realtime_interruptions_total{reason="turn_detected"}'
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
