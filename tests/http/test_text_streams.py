"""Texts that are spoken while they are written: by /v1/audio/speech/stream, and by ElevenLabs' WebSockets."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
import numpy
import pytest
import soundfile
from livekit.agents.types import USERDATA_TIMED_TRANSCRIPT
from livekit.plugins import elevenlabs
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.elevenlabs.tts import ElevenLabsTTSService
from pipecat.services.tts_service import TextAggregationMode
from pipecat.workers.runner import WorkerRunner
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK, InvalidStatus

from omni_actors.http_server.settings import ServerSettings
from tests.support.nightly import nightly
from tests.support.realtime import serving_sessions
from tests.support.servers import HttpPipeline
from tests.support.spoken import SENTENCES, SPOKEN, WRITTEN, TextSocket, said, text_socket, tokens
from tests.support.waiting import PATIENCE, eventually

FLUSH, END, CANCEL = ({"type": f"input_text.{kind}"} for kind in ("flush", "end", "cancel"))


@pytest.fixture(params=["preset", "slow_speech"])
def speaking(request: pytest.FixtureRequest) -> HttpPipeline:
    """A pipeline that speaks sentences, and one that speaks a sentence while it is written."""
    pipeline: HttpPipeline = request.getfixturevalue(request.param)
    return pipeline


async def test_a_text_that_comes_token_by_token_is_spoken_once(speaking: HttpPipeline) -> None:
    async with text_socket(speaking.url) as client:
        await client.append(tokens(WRITTEN))
        await client.send(FLUSH)
        heard, done = await client.heard()
        assert heard == SPOKEN
        assert done["transcript"] == WRITTEN.strip()
        assert done["status"] == "completed"
        assert done["usage"]["output_tokens"] == len(SPOKEN)
        await client.append(["And ", "now"])
        await client.send(END)
        assert (await client.heard())[0] == "And now"
        with pytest.raises(ConnectionClosedOK):
            await client.connection.recv()


@pytest.mark.parametrize(
    ("pipeline", "written", "wanted"),
    [("slow_speech", "The tide is full. I", "The tide is full."), ("writing", "The tide is", "The tid")],
)
async def test_speech_begins_while_the_text_is_written(
    request: pytest.FixtureRequest, pipeline: str, written: str, wanted: str
) -> None:
    """With a sentence, or with a word where the model can. An echo stage keeps a character for its end."""
    async with text_socket(request.getfixturevalue(pipeline).url) as client:
        await client.append(tokens(written))
        heard = b""
        while len(heard) < 2 * len(wanted):
            heard += base64.b64decode((await client.message())["audio"])
        assert said(heard).startswith(wanted)
        await client.append([" is out."])
        await client.send(FLUSH)
        rest, done = await client.heard()
        assert done["transcript"] == f"{written} is out."
        assert (said(heard) + rest).replace(" ", "") == done["transcript"].replace(" ", "")


async def test_what_is_cancelled_is_not_spoken_and_what_follows_is(speaking: HttpPipeline) -> None:
    async with text_socket(speaking.url) as client:
        await client.append(["The tide is full. " * 5000])
        await client.send(FLUSH)
        await client.append(["It turns. "])
        await client.message()
        await client.send(CANCEL)
        heard, done = await client.heard()
        assert (done["status"], len(heard) < 80_000) == ("cancelled", True)
        heard, done = await client.heard()
        assert (heard, done["status"], done["transcript"]) == ("", "cancelled", "")
        speaking.assert_idle()
        await client.append(["It is low."])
        await client.send(FLUSH)
        assert (await client.heard())[0] == "It is low."
        await client.append(["Silence, please"])
        await client.send(END, CANCEL)
        assert (await client.heard())[1]["status"] in ("cancelled", "completed")
        with pytest.raises(ConnectionClosedOK):
            await client.connection.recv()


LONG_SENTENCE = "na" * 300  # in pieces of 400 characters


async def test_the_manner_can_be_changed_between_texts(preset: HttpPipeline) -> None:
    async with text_socket(preset.url) as client:
        fields = {"voice": "Ryan", "language": "german", "response_format": "wav"}
        await client.send({"type": "session.update", "session": fields})
        assert (await client.message())["session"] == fields
        await client.append(["It turns."])
        await client.send({"type": "session.update", "session": {"voice": "vivian", "response_format": "pcm"}}, FLUSH)
        assert (await client.message())["session"] == {**fields, "voice": "vivian", "response_format": "pcm"}
        file = b""
        while (event := await client.message())["type"] == "speech.audio.delta":
            file += base64.b64decode(event["audio"])
        samples, rate = soundfile.read(io.BytesIO(file), dtype="int16")
        assert (said(samples.astype("<i2").tobytes()), rate) == ("language=German voice=ryan It turns.", 24_000)
        await client.append(["Again."])
        await client.send(FLUSH)
        assert (await client.heard())[0] == "language=German voice=vivian Again."
        await client.send({"type": "session.update", "session": {"speed": 2}})
        assert (await client.message())["session"]["speed"] == 2
        await client.append([LONG_SENTENCE])
        await client.send(FLUSH)
        heard, _ = await client.heard()
        assert len(heard) < 0.6 * len(LONG_SENTENCE)


async def test_wrong_events_are_refused_and_the_session_goes_on(slow_speech: HttpPipeline) -> None:
    async with text_socket(slow_speech.url) as client:
        for event, param, code in (
            ({"type": "input_text.apend", "text": "a"}, "type", "invalid_value"),
            ({"type": "session.update", "session": {"input": "a"}}, "session.input", "unknown_parameter"),
            ({"type": "session.update", "session": {"language": "Klingon"}}, "language", "invalid_value"),
            ({"type": "session.update", "session": {"model": "another"}}, "model", "model_not_found"),
            ({"type": "input_text.append", "text": "a" * (1 << 20)}, None, "body_too_large"),
        ):
            await client.send({**event, "event_id": "mine"})
            error = (await client.message())["error"]
            assert (error["param"], error["code"], error["event_id"]) == (param, code, "mine")
        await client.append(["It turns."])
        await client.send(FLUSH)
        assert (await client.heard())[0] == "It turns."
        await client.append(["The tide is full. " * 5000] * 2)  # more than may wait
        _, event = await client.heard("error")
        assert (event["error"]["param"], event["error"]["code"]) == ("text", "body_too_large")


async def test_a_failure_ends_its_text_and_not_the_session(preset: HttpPipeline) -> None:
    async with text_socket(preset.url) as client:
        await client.send({"type": "session.update", "session": {"voice": "alice"}})
        await client.message()
        await client.append(["The tide is full. ", "It turns. "])
        heard, event = await client.heard("error")
        assert (heard, event["error"]["code"], event["error"]["param"]) == ("", "unknown_voice", "voice")
        await client.append(["It is low."])
        await client.send(FLUSH)
        heard, done = await client.heard()
        assert (heard, done["status"], done["transcript"]) == ("", "failed", "")
        await client.send({"type": "session.update", "session": {"voice": "ryan"}})
        await client.message()
        await client.append(["It is low."])
        await client.send(FLUSH)
        assert (await client.heard())[0] == "voice=ryan It is low."


async def test_sessions_are_limited_in_number_and_time_as_realtime_sessions_are(preset: HttpPipeline) -> None:
    settings = ServerSettings(endpoint=preset.endpoint, realtime_sessions=1, realtime_idle_seconds=0.5)
    with serving_sessions(settings) as url:
        async with text_socket(url) as client:
            with pytest.raises(InvalidStatus) as refused:
                await text_socket(url).__aenter__()
            assert refused.value.response.status_code == 429
            await client.append(["No end"])
            assert (await client.message())["error"]["code"] == "session_idle"
            with pytest.raises(ConnectionClosed) as closed:
                await client.connection.recv()
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, "session_idle")


async def test_a_session_has_no_parameters_and_takes_the_key_as_elevenlabs_does(preset: HttpPipeline) -> None:
    settings = ServerSettings(endpoint=preset.endpoint, api_key="sesame", check_host=False)
    path = "/v1/audio/speech/stream"
    with serving_sessions(settings) as url:
        for where, key, status in ((path, "sesam", 401), (f"{path}?a=b", "sesame", 400)):
            with pytest.raises(InvalidStatus) as refused:
                await text_socket(url, where, additional_headers={"xi-api-key": key}).__aenter__()
            assert refused.value.response.status_code == status
        async with text_socket(url, additional_headers={"xi-api-key": "sesame"}) as client:
            await client.append(["It turns."])
            await client.send(FLUSH)
            assert (await client.heard())[0] == "It turns."


def test_without_an_upgrade_the_route_says_what_it_is(preset: HttpPipeline) -> None:
    """As a request arrives behind a proxy that does not pass upgrades on."""
    for path in ("realtime", "audio/speech/stream", "text-to-speech/vivian/stream-input"):
        answer = httpx.get(f"{preset.url}/v1/{path}")
        assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket")
        error = answer.json()["error"]
        assert error["code"] == "upgrade_required"
        assert error["message"].startswith(f"/v1/{path} is a WebSocket")


RATE = 24_000
VOICED = "".join(f"voice=vivian {sentence.strip()}" for sentence in SENTENCES)


class Listener(FrameProcessor):
    """Notes sound and words by context, and which contexts have stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.pcm: defaultdict[str, bytes] = defaultdict(bytes)
        self.words: defaultdict[str, list[str]] = defaultdict(list)
        self.stopped: list[str] = []

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        match frame:
            case TTSAudioRawFrame():
                assert frame.sample_rate == RATE
                self.pcm[str(frame.context_id)] += frame.audio
            case TTSTextFrame():
                self.words[str(frame.context_id)].append(frame.text)
            case TTSStoppedFrame():
                self.stopped.append(str(frame.context_id))
        await self.push_frame(frame, direction)


@asynccontextmanager
async def pipecat(url: str, mode: TextAggregationMode) -> AsyncIterator[tuple[PipelineWorker, Listener]]:
    service = ElevenLabsTTSService(
        api_key="none",
        url=url.replace("http", "ws", 1),
        text_aggregation_mode=mode,
        settings=ElevenLabsTTSService.Settings(voice="vivian"),
    )
    listener = Listener()
    parameters = PipelineParams(audio_out_sample_rate=RATE)
    worker = PipelineWorker(Pipeline([service, listener]), params=parameters, enable_rtvi=False)
    errors: list[ErrorFrame] = []

    @worker.event_handler("on_pipeline_error")
    async def failed(_: PipelineWorker, frame: ErrorFrame) -> None:
        errors.append(frame)

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    try:
        yield worker, listener
        assert not errors, [frame.error for frame in errors]
    finally:
        await runner.cancel()
        await running


async def write(worker: PipelineWorker, texts: Sequence[str]) -> None:
    await worker.queue_frames([LLMFullResponseStartFrame(), *map(LLMTextFrame, texts), LLMFullResponseEndFrame()])


@pytest.mark.parametrize("mode", [TextAggregationMode.SENTENCE, nightly(TextAggregationMode.TOKEN)])
async def test_pipecat_speaks_sentences_as_they_are_written(preset: HttpPipeline, mode: TextAggregationMode) -> None:
    async with pipecat(preset.url, mode) as (worker, listener):
        for count in (1, 2):
            await write(worker, tokens(WRITTEN))
            await eventually(lambda wanted=count: len(listener.stopped) == wanted, 20, lambda: f"{listener.words}")
        assert [said(pcm) for pcm in listener.pcm.values()] == [VOICED] * 2
        assert [" ".join(words) for words in listener.words.values()] == [WRITTEN.strip()] * 2


@asynccontextmanager
async def livekit(url: str, **options: Any) -> AsyncIterator[elevenlabs.TTS]:
    async with aiohttp.ClientSession() as session:
        service = elevenlabs.TTS(base_url=f"{url}/v1", api_key="none", http_session=session, **options)
        try:
            yield service
        finally:
            await service.aclose()


async def spoken_by(service: elevenlabs.TTS, texts: Sequence[str]) -> tuple[bytes, str]:
    """What a stream of a service says, and the words that it has times of."""
    pcm, words = b"", ""
    async with service.stream() as stream, asyncio.timeout(20 * PATIENCE):
        for text in texts:
            stream.push_text(text)
        stream.end_input()
        async for event in stream:
            pcm += bytes(event.frame.data)
            words += "".join(event.frame.userdata.get(USERDATA_TIMED_TRANSCRIPT, ()))
    return pcm, words


async def test_livekit_speaks_sentences_as_they_are_written(preset: HttpPipeline) -> None:
    async with livekit(preset.url, voice_id="vivian", encoding="pcm_24000") as service:
        for _ in range(2):
            pcm, words = await spoken_by(service, tokens(WRITTEN))
            assert said(pcm).rstrip("\0") == VOICED  # the plugin may add some silence
            assert words.split() == WRITTEN.split()


async def test_livekit_speaks_with_all_its_defaults(slow_speech: HttpPipeline) -> None:
    """With a voice and a model of ElevenLabs', and MP3 at 22,050 Hz."""
    async with livekit(slow_speech.url) as service:
        pcm, _ = await spoken_by(service, tokens(WRITTEN))
    samples = numpy.frombuffer(pcm, "<i2")
    assert len(samples) / 22_050 == pytest.approx(len(SPOKEN) / RATE, abs=0.15)
    assert numpy.abs(samples).max() > 5000


def multi(url: str, query: str = "output_format=pcm_24000", voice: str = "vivian") -> Any:
    return text_socket(url, f"/v1/text-to-speech/{voice}/multi-stream-input?{query}")


async def heard(client: TextSocket, context: str | None = None) -> tuple[bytes, list[dict[str, Any]]]:
    """The sound of a context up to its end, and its times."""
    data, times = b"", []
    while not (message := await client.message())["isFinal"]:
        assert message["contextId"] == context
        data += base64.b64decode(message["audio"] or "")
        times += [message["alignment"]] if message["alignment"] else []
        assert message["normalizedAlignment"] == message["alignment"]
    assert message["contextId"] == context
    return data, times


async def test_one_text_ends_with_an_empty_one(preset: HttpPipeline) -> None:
    path = "/v1/text-to-speech/vivian/stream-input?output_format=pcm_24000&model_id=eleven_flash_v2_5&auto_mode=false"
    async with text_socket(preset.url, path) as client:
        await client.send({"text": " ", "voice_settings": {"stability": 0.5, "speed": 1}, "xi_api_key": "none"})
        await client.send(*({"text": text, "try_trigger_generation": True} for text in tokens(WRITTEN)), {"text": ""})
        pcm, times = await heard(client)
        assert said(pcm) == VOICED
        with pytest.raises(ConnectionClosedOK):
            await client.connection.recv()
    for sentence, alignment in zip(SENTENCES, times, strict=True):
        assert "".join(alignment["chars"]) == f"{sentence.strip()} "
        starts, lengths = alignment["charStartTimesMs"], alignment["charDurationsMs"]
        assert starts[0] == 0
        assert [end - begin for begin, end in itertools.pairwise(starts)] == lengths[:-1]
        seconds = len(f"voice=vivian {sentence.strip()}") / RATE
        assert starts[-1] + lengths[-1] == round(1000 * seconds)


async def test_contexts_are_spoken_at_the_same_time_and_interrupted_each_for_itself(slow_speech: HttpPipeline) -> None:
    async with multi(slow_speech.url) as client:
        for name in ("a", "b", "c"):
            await client.send(
                {"text": " ", "context_id": name}, {"text": "The tide is full. " * 1000, "context_id": name}
            )
        began: set[str] = set()
        while len(began) < 3:
            began.add((await client.message())["contextId"])
        await client.send({"context_id": "a", "close_context": True})  # not flushed, so this interrupts it
        await client.send({"context_id": "b", "flush": True}, {"context_id": "b", "close_context": True})
        await client.send({"context_id": "b", "close_context": True})  # flushed, but closed twice
        ended: list[str] = []
        for _ in range(5000):  # of some 50,000 pieces of sound
            message = await client.message()
            ended += [message["contextId"]] if message["isFinal"] else []
            if len(ended) == 2:
                break
        assert sorted(ended) == ["a", "b"]
        for _ in range(5):
            assert (await client.message())["contextId"] == "c", "nothing more of the others comes"
        await client.send({"text": "", "context_id": "a"}, {"text": ""}, {"context_id": "a", "close_context": True})
        await client.send({"close_socket": True})
        while not (message := await client.message())["isFinal"]:
            assert message["contextId"] == "c"
        with pytest.raises(ConnectionClosedOK):
            await client.connection.recv()


async def test_what_was_flushed_is_spoken_before_its_context_and_the_socket_close(preset: HttpPipeline) -> None:
    async with multi(preset.url, voice="hpp4J3VqNfWAUOO0d1Us") as client:  # an id of ElevenLabs': the default voice
        await client.send({"text": WRITTEN}, {"flush": True}, {"close_socket": True}, {"text": "Too late."})
        messages = [json.loads(message) async for message in client.connection]  # until it is closed in order
        assert [message["code"] for message in messages if "error" in message] == ["invalid_value"]
        sound = b"".join(base64.b64decode(message.get("audio") or "") for message in messages)
        assert said(sound) == SPOKEN
        assert messages[-1]["isFinal"]


async def test_a_query_that_cannot_be_had_is_refused(preset: HttpPipeline) -> None:
    for query, param in (
        ("output_format=pcm_11025", "output_format"),
        ("enable_ssml_parsing=true", "enable_ssml_parsing"),
        ("voice=a", "voice"),
        ("language_code=tlh", "language"),
        ("model_id=another", "model"),
        ("inactivity_timeout=soon", "inactivity_timeout"),
    ):
        with pytest.raises(InvalidStatus) as refused:
            await multi(preset.url, query).__aenter__()
        assert refused.value.response.status_code == (404 if param == "model" else 400)
        assert f'"param":"{param}"' in refused.value.response.body.decode()


async def test_a_failure_ends_its_context_and_a_wrong_message_ends_nothing(preset: HttpPipeline) -> None:
    async with multi(preset.url, "output_format=pcm_24000&language_code=de", voice="alice") as client:
        for message, code in (
            ({"text": "a", "context_id": "a", "voice_settings": {"speed": 1.2}}, "invalid_value"),
            ({"texts": "a"}, "unknown_parameter"),
        ):
            await client.send(message)
            assert (await client.message())["code"] == code
        await client.send({"text": "It turns. And", "context_id": "a"})
        error = await client.message()
        assert (error["code"], error["contextId"]) == ("unknown_voice", "a")
        assert (await client.message())["isFinal"]
    async with multi(preset.url, "output_format=pcm_24000", voice="ryan") as client:
        await client.send(*({"text": "One", "context_id": name} for name in "abcdef"))
        refused = await client.message()  # five wait for their text
        assert (refused["error"][:22], refused["contextId"]) == ("There may be 5 context", "f")
