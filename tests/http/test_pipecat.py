"""A program of pipecat-ai, unchanged, with its service for the Live API; for realtime: tests/e2e/test_speaker.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    LLMFullResponseStartFrame,
    LLMRunFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallParams, LLMService
from pipecat.services.openai.live.llm import OpenAILiveLLMService
from pipecat.services.openai.responses.llm import OpenAIResponsesLLMService
from pipecat.turns.user_turn_strategies import ExternalUserTurnStrategies
from pipecat.workers.runner import WorkerRunner

from omni_actors.http_server.realtime.formats import RATE
from omni_actors.http_server.realtime.live_sessions import PATH
from tests.support.live import CONVERSATION, check_live_conversation
from tests.support.realtime import SILENCE, speech
from tests.support.servers import HttpPipeline
from tests.support.waiting import PATIENCE, eventually

PIECE = 2400  # samples of one frame, 100 ms


class Loudspeaker(FrameProcessor):
    """Notes what is said in each answer."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        match frame:
            case LLMFullResponseStartFrame():
                self.texts.append("")
            case TTSTextFrame():
                self.texts[-1] += frame.text
        await self.push_frame(frame, direction)


class Voice:
    def __init__(self, service: LLMService[Any], tools: Sequence[Any] = ()) -> None:
        self.context = LLMContext(tools=list(tools))
        # Those that the service recommends when it is connected; until then there would be a detector of pipecat's.
        by_server = LLMUserAggregatorParams(user_turn_strategies=ExternalUserTurnStrategies())
        user, assistant = LLMContextAggregatorPair(self.context, user_params=by_server)
        self.heard = Loudspeaker()
        self.worker = PipelineWorker(Pipeline([user, service, self.heard, assistant]), enable_rtvi=False)
        self.errors: list[ErrorFrame] = []

        @self.worker.event_handler("on_pipeline_error")
        async def failed(_: PipelineWorker, frame: ErrorFrame) -> None:
            self.errors.append(frame)

    async def speak(self, *sounds: numpy.ndarray) -> None:
        samples = numpy.concatenate(sounds)
        for start in range(0, len(samples), PIECE):
            piece = samples[start : start + PIECE].tobytes()
            await self.worker.queue_frame(InputAudioRawFrame(audio=piece, sample_rate=RATE, num_channels=1))

    def said(self) -> list[str]:
        return [str(message["content"]) for message in self.context.messages if message["role"] == "user"]


@asynccontextmanager
async def conversation(voice: Voice) -> AsyncIterator[Voice]:
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(voice.worker)
    running = asyncio.create_task(runner.run())
    try:
        yield voice
        assert not voice.errors, [frame.error for frame in voice.errors]
    finally:
        await runner.cancel()
        await running


async def weather(params: FunctionCallParams, city: str) -> None:
    """Say how the weather is in a city.

    Args:
        city: where.
    """
    assert city == "Kiel"
    await params.result_callback("14 degrees.")


async def test_pipecat_holds_a_live_conversation_and_does_what_is_delegated(scripted: HttpPipeline) -> None:
    backend = OpenAIResponsesLLMService.Settings(model="gpt-5.4-mini")
    service = OpenAILiveLLMService(
        api_key="none",
        base_url=f"{scripted.url.replace('http', 'ws', 1)}{PATH}",
        settings=OpenAILiveLLMService.Settings(system_instruction=CONVERSATION),
        delegation=OpenAILiveLLMService.ResponsesDelegation(settings=backend),
    )
    started = asyncio.Event()

    @service.event_handler("on_session_started")
    async def begun(*_: object) -> None:
        started.set()

    async with conversation(Voice(service, [weather])) as voice:

        async def said(ending: str) -> None:
            heard = voice.heard
            await eventually(lambda: "".join(heard.texts).endswith(ending), 20, lambda: f"{ending}: {heard.texts}")

        await voice.worker.queue_frame(LLMRunFrame())
        async with asyncio.timeout(20 * PATIENCE):
            await started.wait()
        for ending in ("Hello.", "three", '14 degrees."', "three", "Bye."):
            await voice.speak(speech(1.0), SILENCE)
            await said(ending)
        check_live_conversation("".join(voice.heard.texts).replace('"', ""))
        # What is said within 0.8 s is one turn for pipecat.
        turns = "Write down what is said"
        await eventually(lambda: "".join(voice.said()).count(turns) == 5, 20, lambda: f"transcripts: {voice.said()}")
