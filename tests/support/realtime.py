"""Realtime sessions for tests: the decisions alone, and sound that a detector takes for speech."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, NamedTuple, get_args

import httpx
import msgspec
import numpy
from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.realtime import RealtimeResponse, RealtimeServerEvent
from pydantic import BaseModel, TypeAdapter

from omni_actors.http_server.app import create_app
from omni_actors.http_server.connections import bounded_websocket
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.realtime.config import Pipeline, ServerVad, SessionConfig, parse
from omni_actors.http_server.realtime.formats import RATE
from omni_actors.http_server.realtime.session import Ask, Cancel, Instructions, RealtimeSession, Transcribe
from omni_actors.http_server.realtime.turns import SpeechWindow
from omni_actors.http_server.settings import ServerSettings
from omni_actors.sharing import Budget
from tests.support.servers import serving
from tests.support.waiting import PATIENCE, eventually

OPENAI = TypeAdapter(RealtimeServerEvent)
# Fields that OpenAI's types do not have: its server sends the first three, the others are extensions.
EXTRA = {"id", "object", "expires_at", "seed", "stage_params", "stages"}
PIPELINE = Pipeline(voices=("Chelsie", "Ethan"), stages=("thinker", "talker"), speaks=True, audio_seconds=10.0)
CALLED = msgspec.structs.replace(PIPELINE, called=True)
SECOND = bytes(2 * RATE)
WINDOW = 768  # samples of one window of the detector


def conforms(event: dict[str, Any]) -> None:
    """Fails unless the event is what the `openai` package declares, and nothing more but other rates of PCM."""
    parsed = OPENAI.validate_json(re.sub(rb'"rate":(8000|16000)', b'"rate":24000', msgspec.json.encode(event)))
    extra = set(extra_fields(parsed))
    assert extra <= EXTRA, f"{event['type']} has {extra - EXTRA}"


def extra_fields(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from extra_fields(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from extra_fields(item)


class Talk:
    """A session that remembers what it sent, asked and cancelled."""

    def __init__(
        self, pipeline: Pipeline = PIPELINE, vad: ServerVad | None = None, audio_seconds: float = 10.0, **config: Any
    ) -> None:
        pipeline = msgspec.structs.replace(pipeline, audio_seconds=audio_seconds)
        first = SessionConfig(model="echo", output="audio" if pipeline.speaks else "text", turn_detection=vad, **config)
        self.session = RealtimeSession(first, pipeline, expires=0)
        self.instructions: Instructions = []
        self.events: list[dict[str, Any]] = []
        self.asked: list[Ask] = []
        self.cancelled: list[str] = []
        self.transcribed: list[Transcribe] = []
        self._seen = 0
        self._position = 0
        self.take(self.session.opened())

    def take(self, instructions: Instructions) -> list[dict[str, Any]]:
        """Notes instructions; returns the events among them."""
        before = len(self.events)
        self.instructions += instructions
        for instruction in instructions:
            match instruction:
                case dict() as event:
                    self.events.append(msgspec.json.decode(msgspec.json.encode(event)))
                    conforms(self.events[-1])
                case Ask():
                    self.asked.append(instruction)
                case Cancel(response_id):
                    self.cancelled.append(response_id)
                case Transcribe():
                    self.transcribed.append(instruction)
        return self.events[before:]

    def send(self, kind: str, pictures: Sequence[bytes] = (), **fields: Any) -> list[dict[str, Any]]:
        """Takes an event of the client; returns the events that answer it."""
        return self.take(self.session.receive(parse(msgspec.json.encode({"type": kind, **fields})), pictures))

    def say(self, text: str, role: str = "user", **fields: Any) -> str:
        """Adds an item of text; returns its id."""
        kind = "output_text" if role == "assistant" else "input_text"
        item = {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **fields}
        return str(self.send("conversation.item.create", item=item)[0]["item"]["id"])

    def append(self, pcm: bytes) -> list[dict[str, Any]]:
        return self.send("input_audio_buffer.append", audio=base64.b64encode(pcm).decode())

    def hear(self, probability: float, windows: int = 1) -> list[dict[str, Any]]:
        """Takes windows of sound of which a detector says this."""
        events = self.append(bytes(2 * WINDOW * windows))
        return [*events, *self.take(self.session.detect(self.windows(probability, windows)))]

    def windows(self, probability: float, count: int) -> list[SpeechWindow]:
        """The next windows of a detector."""
        found = []
        for _ in range(count):
            found.append(SpeechWindow(self._position, self._position + WINDOW, probability))
            self._position += WINDOW
        return found

    def respond(self, **fields: Any) -> str:
        """Starts a response; returns its id."""
        (created,) = self.send("response.create", **({"response": fields} if fields else {}))
        assert created["type"] == "response.created", created
        return str(created["response"]["id"])

    def answer(self, text: str, seconds: float = 1.0) -> str:
        """Gives a whole spoken answer; returns the id of its item."""
        response = self.respond()
        events = self.take(self.session.text(response, text))
        self.take(self.session.sound(response, bytes(int(seconds * RATE) * 2)))
        self.take(self.session.answered(response, {}, cut=False))
        return str(events[0]["item"]["id"])

    def fail(self, response: str, code: str) -> list[dict[str, Any]]:
        return self.take(self.session.failed(response, HttpError(400, "It failed.", code=code)))

    def prompt(self) -> list[tuple[str, str]]:
        """Role and texts of each message of the newest question; sound as its length in seconds."""
        found = []
        for message in self.asked[-1].messages:
            content = message["content"]
            parts = [content] if isinstance(content, str) else [_shown(part) for part in content]
            found.append((message["role"], " ".join(parts)))
        return found


def _shown(part: dict[str, Any]) -> str:
    if part["type"] == "image":
        return f"<{part['image'].decode()}>"
    return part["text"] if part["type"] == "text" else f"{len(part['audio'][0]) / RATE:g} s"


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def error_of(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    (event,) = events
    assert event["type"] == "error", event
    found: dict[str, Any] = event["error"]
    return found


def serving_sessions(settings: ServerSettings, **options: object) -> AbstractContextManager[str]:
    """A server inside the test's process that has sessions; gives its URL."""
    bodies = Budget(settings.bodies_bytes)
    app, websocket = create_app(settings, bodies=bodies), bounded_websocket(settings, bodies)
    return serving(app, ws=websocket, ws_max_size=settings.body_bytes, **options)


class Turn(NamedTuple):
    """What a server said in a turn: the text, the sound as i16 at `RATE`, and the response."""

    text: str
    pcm: bytes
    response: RealtimeResponse


MANUAL = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}


@asynccontextmanager
async def openai_session(
    url: str, model: str = "echo", query: dict[str, str] | None = None, **session: Any
) -> AsyncIterator[AsyncRealtimeConnection]:
    """A session of the `openai` package, without detection of turns unless `session` says otherwise."""
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
        client.realtime.connect(model=model, extra_query=query or {}) as connection,
        asyncio.timeout(60 * PATIENCE),
    ):
        await connection.session.update(session={**MANUAL, **session})
        yield connection


async def hear(connection: AsyncRealtimeConnection, sound: numpy.ndarray | bytes, piece: int | None = None) -> None:
    """Have a session hear i16 at `RATE`, or bytes as they are, at once or in pieces of so many bytes."""
    data = sound if isinstance(sound, bytes) else sound.tobytes()
    for start in range(0, len(data), piece or len(data)):
        part = data[start : start + (piece or len(data))]
        await connection.input_audio_buffer.append(audio=base64.b64encode(part).decode())


async def spoken_turn(url: str, model: str, recording: bytes, voice: str, **fields: Any) -> Turn:
    """Speak to a server, with the `openai` package, and hear its answer.

    Args:
        recording: i16 at `RATE`.
        fields: further ones of the session.
    """
    audio = {"input": {"turn_detection": None}, "output": {"voice": voice}}
    async with openai_session(url, model, audio=audio, **fields) as connection:
        await hear(connection, recording)
        await connection.input_audio_buffer.commit()
        await connection.response.create()
        return await answer_on(connection)


async def answer_on(connection: AsyncRealtimeConnection) -> Turn:
    """Hear the answer that was asked for on a connection of the `openai` package."""
    text, pcm = "", b""
    async for event in connection:
        if event.type == "response.output_audio_transcript.delta":
            text += event.delta
        elif event.type == "response.output_audio.delta":
            pcm += base64.b64decode(event.delta)
        elif event.type == "response.done":
            return Turn(text, pcm, event.response)
    raise AssertionError("the server ended the session before the response")


async def until_event(connection: AsyncRealtimeConnection, kind: str) -> list[Any]:
    """The events up to the first one of a kind."""
    found = []
    async with asyncio.timeout(10 * PATIENCE):
        async for event in connection:
            found.append(event)
            if event.type == kind:
                return found
    raise AssertionError(f"the session ended before {kind}")


# A conversation of three turns; the last interrupts the second answer. Echo stages answer with all texts so far.
INSTRUCTIONS = "one two three four five six seven eight nine ten "
SILENCE = numpy.zeros(RATE, "<i2")


def check_conversation(answers: Sequence[str], user: Sequence[str]) -> None:
    """Fails unless these are the texts of such a conversation: of its answers, and of the user's turns."""
    first, second, third = answers
    assert first == INSTRUCTIONS
    assert second == INSTRUCTIONS * 2, "its text is made before its sound"
    assert third.startswith(second), "the model knows what it has said first"
    heard = third.removeprefix(second)
    assert second.startswith(heard)
    assert 0 < len(heard) < len(second), "of the second answer it knows what was heard"
    assert len(user) == 3
    assert all(text.startswith("Write down what is said") for text in user), "what echo stages write down"


def metric(url: str, name: str, key: str = "none") -> float:
    """A metric of a server; the sum of all that begin with the name."""
    text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {key}"}).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


async def no_session(url: str, key: str = "none") -> None:
    """Wait until the pipeline has no session on any server."""
    await eventually(lambda: not metric(url, "omni_realtime_sessions ", key), what="the end of all sessions")


def in_flight(url: str) -> int:
    """How many requests run."""
    return int(httpx.get(f"{url}/v1/status").json()["in_flight"])


async def no_request(url: str) -> None:
    """Wait until none runs."""
    await eventually(lambda: in_flight(url) == 0, what="the end of all requests")


def interruptions(url: str) -> float:
    """How many answers a user's speech has cut short."""
    return metric(url, 'omni_realtime_interruptions_total{reason="turn_detected"}')


def known_types(union: Any) -> dict[str, type[BaseModel]]:
    """The models of one of the package's unions, by their `type`."""
    models = get_args(get_args(union)[0])
    return {get_args(model.model_fields["type"].annotation)[0]: model for model in models}


def speech(seconds: float, seed: int = 0) -> numpy.ndarray:
    """Vowels: pulses of a voice through the formants of a mouth, i16 at `RATE`; detectors take them for speech."""
    rng = numpy.random.default_rng(seed)
    count = int(seconds * RATE)
    time = numpy.arange(count) / RATE
    pitch = 120 * (1 + 0.15 * numpy.sin(2 * numpy.pi * 0.8 * time) + 0.03 * numpy.sin(2 * numpy.pi * 5 * time))
    pulses = (numpy.diff(numpy.floor(numpy.cumsum(pitch) / RATE), prepend=0) > 0).astype(float)
    vowels = [(730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410)]
    voice = numpy.zeros(count)
    position = 0
    while position < count:
        length = min(int(0.22 * RATE * rng.uniform(0.7, 1.3)), count - position)
        piece = pulses[position : position + length] + 0.005 * rng.standard_normal(length)
        spectrum = numpy.fft.rfft(piece, 2 * length)
        turns = numpy.exp(-2j * numpy.pi * numpy.arange(len(spectrum)) / (2 * length))
        for formant, width in zip(vowels[rng.integers(5)], (80, 100, 140), strict=True):
            radius = numpy.exp(-numpy.pi * width / RATE)
            pole = radius * numpy.exp(2j * numpy.pi * formant / RATE)
            spectrum *= (1 - radius) / ((1 - pole * turns) * (1 - numpy.conj(pole) * turns))
        voice[position : position + length] = numpy.fft.irfft(spectrum)[:length] * numpy.sqrt(numpy.hanning(length))
        position += length
    return (voice / numpy.abs(voice).max() * 16_000).astype("<i2")
