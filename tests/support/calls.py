"""A client of realtime sessions over WebRTC, by aiortc, which speaks and hears."""

from __future__ import annotations

import asyncio
import contextlib
import fractions
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from av import AudioFrame, AudioResampler

from omni_actors.http_server.realtime.formats import RATE
from tests.support.realtime import conforms
from tests.support.waiting import PATIENCE

PACKET = RATE // 50  # samples


class Microphone(MediaStreamTrack):
    """Always open: silence, but for what is said."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self._said: deque[numpy.ndarray] = deque()
        self._begun = time.monotonic()
        self._count = 0

    def say(self, pcm: numpy.ndarray) -> None:
        """Speak i16 at `RATE`."""
        padded = numpy.pad(pcm, (0, -len(pcm) % PACKET))
        self._said.extend(padded.reshape(-1, PACKET))

    async def recv(self) -> AudioFrame:
        await asyncio.sleep(self._begun + self._count * PACKET / RATE - time.monotonic())
        samples = self._said.popleft() if self._said else numpy.zeros(PACKET, numpy.int16)
        frame = AudioFrame.from_ndarray(samples.astype(numpy.int16)[None], "s16", "mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE, self._count * PACKET, fractions.Fraction(1, RATE)
        self._count += 1
        return frame


class Caller:
    """One call: the events that came, and the sound.

    Args:
        hears: whether it has a microphone.
        check: fails unless an event is what the `openai` package declares.
    """

    def __init__(self, hears: bool = True, check: Callable[[dict[str, Any]], None] = conforms) -> None:
        self._check = check
        self.microphone = Microphone()
        self.peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.peer.addTransceiver(self.microphone if hears else "audio", "sendrecv" if hears else "recvonly")
        self.channel = self.peer.createDataChannel("oai-events")
        self.events: list[dict[str, Any]] = []
        self.heard: list[numpy.ndarray] = []  # i16 at `RATE`, of each packet
        self.location = ""
        self.answer = ""
        self._came = asyncio.Condition()
        self.closed = asyncio.Event()
        self._ear: asyncio.Task[None] | None = None
        self.peer.on("track", self._hear)
        self.channel.on("message", self._note)
        self.channel.on("close", self.closed.set)

    async def offer(self) -> str:
        """The SDP offer."""
        await self.peer.setLocalDescription(await self.peer.createOffer())
        return str(self.peer.localDescription.sdp)

    async def connect(self, url: str, key: str = "none", session: dict[str, Any] | None = None, **query: str) -> None:
        """Call a server. Raises `httpx.HTTPStatusError`."""
        response = await post_offer(url, await self.offer(), key, session, **query)
        response.raise_for_status()
        assert response.status_code == 201
        await self.take_answer(response.headers["location"], response.text)

    async def take_answer(self, location: str, answer: str, first: str = "session.created") -> None:
        """Connect, once a server has answered the offer, and wait for its first event."""
        self.location, self.answer = location, answer
        await self.peer.setRemoteDescription(RTCSessionDescription(self.answer, "answer"))
        await self.until(first)

    def vanish(self) -> None:
        """Be gone without a word."""
        for protocol in self.peer.sctp.transport.transport._connection._protocols:
            protocol.datagram_received = protocol.transport.sendto = lambda *_: None

    def send_beyond_the_limit(self, text: str) -> None:
        """Send a message of any length."""
        self.peer.sctp._remote_max_message_size = 0
        self.channel.send(text)

    def send(self, kind: str, **fields: Any) -> None:
        self.channel.send(json.dumps({"type": kind, **fields}))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    async def until(self, kind: str, count: int = 1, seconds: float = 15) -> dict[str, Any]:
        """Wait for an event; returns the last one of its kind."""
        async with asyncio.timeout(seconds * PATIENCE), self._came:
            await self._came.wait_for(lambda: len(self.of_kind(kind)) >= count)
        return self.of_kind(kind)[-1]

    @property
    def sound(self) -> numpy.ndarray:
        """All that was heard."""
        return numpy.concatenate(self.heard) if self.heard else numpy.zeros(0, numpy.int16)

    async def close(self) -> None:
        if self._ear is not None:
            self._ear.cancel()
        await self.peer.close()

    def _hear(self, track: MediaStreamTrack) -> None:
        self._ear = asyncio.create_task(self._listen(track))

    async def _listen(self, track: MediaStreamTrack) -> None:
        resampler = AudioResampler("s16", "mono", RATE)
        with contextlib.suppress(MediaStreamError):
            while True:
                self.heard += [piece.to_ndarray()[0] for piece in resampler.resample(await track.recv())]

    async def _note(self, text: str) -> None:
        event = json.loads(text)
        self._check(event)
        self.events.append(event)
        async with self._came:
            self._came.notify_all()


async def post_offer(
    url: str,
    offer: str,
    key: str = "none",
    session: dict[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    **query: str,
) -> httpx.Response:
    where, given = f"{url}/v1/realtime/calls", {"authorization": f"Bearer {key}", **(headers or {})}
    async with httpx.AsyncClient(timeout=30 * PATIENCE, headers=given, params=query) as client:
        if session is not None:
            form = {"sdp": (None, offer), "session": (None, json.dumps(session))}
            return await client.post(where, files=form)
        return await client.post(where, content=offer, headers={"content-type": "application/sdp"})


@asynccontextmanager
async def call(url: str, *, hears: bool = True, **options: Any) -> AsyncIterator[Caller]:
    """A call that is connected."""
    caller = Caller(hears)
    try:
        await caller.connect(url, **options)
        yield caller
    finally:
        await caller.close()
