"""Who talks to the programs of docs/deploying.md: LiveKit's console, and a page over WebRTC."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy
import soxr
from aiortc import RTCSessionDescription
from livekit.protocol.agent_pb.agent_session import AgentSessionMessage as Message

from omni_actors.http_server.realtime.formats import RATE
from tests.support.calls import Caller
from tests.support.paths import REPOSITORY
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE, eventually

CONSOLE_RATE = 48_000
LOUD = 1000  # of a sample of speech, and not of silence
LEAST_SECONDS = 1.0  # of the sound of an answer
SECONDS = 30  # for a whole conversation


def program(name: str, url: str, folder: Path) -> Path:
    """Write a program of the page as printed, but for the address of the server."""
    page = (REPOSITORY / "docs" / "deploying.md").read_text()
    (code,) = re.findall(rf"and `{name}`:\n\n```python\n(.*?)^```", page, re.M | re.S)
    address = url.partition("://")[2]
    (folder / name).write_text(code.replace("127.0.0.1:8000", address))
    return folder / name


@asynccontextmanager
async def running(*arguments: str | Path) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(sys.executable, *map(str, arguments))
    try:
        yield
        assert process.returncode is None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def loud_seconds(samples: numpy.ndarray, rate: int) -> float:
    """Seconds from the first sound that is loud to the last one."""
    found = numpy.flatnonzero(numpy.abs(samples.astype(int)) > LOUD)
    return float(found[-1] - found[0]) / rate if len(found) else 0.0


async def ask_livekit(url: str, question: numpy.ndarray, folder: Path) -> tuple[str, float]:
    """Ask as the console does, with i16 at `RATE`. Returns the text of the answer, and seconds of its sound."""
    connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()
    console = await asyncio.start_server(lambda *streams: connected.set_result(streams), "127.0.0.1", 0)
    where = f"127.0.0.1:{console.sockets[0].getsockname()[1]}"
    path = program("agent.py", url, folder)
    async with (
        asyncio.timeout(SECONDS * PATIENCE),
        console,
        running("-m", "livekit.agents", "console", path, "--connect-addr", where),
    ):
        reader, writer = await connected
        async with asyncio.TaskGroup() as tasks:
            mouth = tasks.create_task(_speak(writer, soxr.resample(question, RATE, CONSOLE_RATE)))
            answer = await _answer(reader, writer)
            mouth.cancel()
        writer.close()
    return answer


def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    data = message.SerializeToString()
    writer.write(struct.pack(">I", len(data)) + data)


async def _speak(writer: asyncio.StreamWriter, said: numpy.ndarray) -> None:
    """Speak i16 at `CONSOLE_RATE` after a second, and then be silent."""
    piece = CONSOLE_RATE // 100
    frame = {"sample_rate": CONSOLE_RATE, "num_channels": 1, "samples_per_channel": piece}
    quiet, parts = bytes(2 * piece), numpy.pad(said, (0, -len(said) % piece)).reshape(-1, piece)
    spoken = (part.tobytes() for part in parts)
    for sound in itertools.chain(itertools.repeat(quiet, 100), spoken, itertools.repeat(quiet)):
        await asyncio.sleep(0.01)
        _send(writer, Message(audio_input=Message.ConsoleIO.AudioFrame(data=sound, **frame)))


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, float]:
    heard: list[bytes] = []
    while True:
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        message = Message.FromString(await reader.readexactly(size))
        match message.WhichOneof("message"):
            case "audio_output":
                heard.append(message.audio_output.data)
            case "audio_playback_flush":
                _send(writer, Message(audio_playback_finished=Message.ConsoleIO.AudioPlaybackFinished()))
            case "event" if heard:
                if text := message.event.conversation_item_added.item.message.content:
                    return text[0].text, loud_seconds(numpy.frombuffer(b"".join(heard), "<i2"), CONSOLE_RATE)


async def ask_pipecat(url: str, question: numpy.ndarray, folder: Path) -> tuple[str, float]:
    """Ask as the page of pipecat's runner does, with i16 at `RATE`. Returns the same."""
    port = free_port()
    where = f"http://127.0.0.1:{port}"
    caller = Caller(check=lambda _: None)

    def said() -> list[str]:
        return [event["data"]["text"] for event in caller.events if event["type"] == "bot-transcription"]

    def spoken() -> float:
        return loud_seconds(caller.sound, RATE)

    async def is_up() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await client.get(f"{where}/status")).status_code == 200
        return False

    path = program("bot.py", url, folder)
    async with running(path, "-t", "webrtc", "--port", str(port)), httpx.AsyncClient(trust_env=False) as client:
        try:
            await eventually(is_up, SECONDS)
            offer = {"sdp": await caller.offer(), "type": "offer"}
            answer = (await client.post(f"{where}/api/offer", json=offer)).raise_for_status().json()
            await caller.peer.setRemoteDescription(RTCSessionDescription(answer["sdp"], answer["type"]))
            caller.microphone.say(question)
            await eventually(lambda: said() and spoken() > LEAST_SECONDS, SECONDS, lambda: str(caller.events))
        finally:
            await caller.close()
    return " ".join(said()), spoken()
