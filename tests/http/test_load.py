"""200 streams at once, text and speech, through one HTTP process and four echo stages."""

from __future__ import annotations

import asyncio
import base64
import statistics
import time
from dataclasses import dataclass

import msgspec
import pytest

from tests.support.servers import HttpPipeline

pytestmark = pytest.mark.nightly

STREAMS = 200
TEXT = "the sea is calm tonight, the tide is full"  # 41 tokens, 0.82 s of audio
SAMPLES = 480 * len(TEXT)


async def one(url: str) -> Seen:
    """One stream over a plain socket: the client's own work would hide the server's latency otherwise."""
    body = msgspec.json.encode(
        {
            "model": "echo",
            "stream": True,
            "modalities": ["text", "audio"],
            "messages": [{"role": "user", "content": TEXT}],
        }
    )
    host, port = url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + body)
    pieces: list[tuple[float, bytes]] = []
    while piece := await reader.read(1 << 16):
        pieces.append((time.perf_counter() - began, piece))
    writer.close()
    return Seen(pieces)


@dataclass
class Seen:
    """A response, with the seconds from the request to each piece."""

    pieces: list[tuple[float, bytes]]

    @property
    def first_byte(self) -> float:
        return self.pieces[0][0]

    @property
    def total(self) -> float:
        return self.pieces[-1][0]

    def first(self, word: bytes) -> float:
        return next(when for when, piece in self.pieces if word in piece)

    def answer(self) -> tuple[str, int, bool]:
        """Text, samples, and whether the response is complete."""
        head, _, rest = b"".join(piece for _, piece in self.pieces).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        text, samples, done = "", 0, False
        for event in _unchunked(rest).split(b"\n\n"):
            if event == b"data: [DONE]":
                done = True
            elif event:
                chunk = msgspec.json.decode(event.removeprefix(b"data: "))
                for choice in chunk["choices"]:
                    audio = choice["delta"].get("audio") or {}
                    text += audio.get("transcript") or ""
                    samples += len(base64.b64decode(audio.get("data") or "")) // 2
        return text, samples, done


def _unchunked(data: bytes) -> bytes:
    """The content of a body in chunked transfer encoding."""
    content = []
    while True:
        size, _, data = data.partition(b"\r\n")
        if not int(size, 16):
            return b"".join(content)
        content.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[round(1000 * share) - 1]


@pytest.mark.timeout(180)
def test_two_hundred_streams_at_once(echo: HttpPipeline, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> tuple[list[Seen], float]:
        await one(echo.url)
        began = time.perf_counter()
        seen = await asyncio.gather(*(one(echo.url) for _ in range(STREAMS)))
        return seen, time.perf_counter() - began

    seen, wall = asyncio.run(run())
    assert [item.answer() for item in seen] == [(TEXT, SAMPLES, True)] * STREAMS
    measured = {
        "first byte": [item.first_byte for item in seen],
        "first audio": [item.first(b'"data":"') for item in seen],
        "whole": [item.total for item in seen],
    }
    with capsys.disabled():
        print(f"\n{STREAMS} spoken streams at once in {wall:.2f} s, {STREAMS * 2 * len(TEXT) / wall:.0f} events/s")
        for name, values in measured.items():
            p50, p99 = (1000 * percentile(values, share) for share in (0.5, 0.99))
            print(f"  {name:12} p50 {p50:7.1f} ms  p99 {p99:7.1f} ms")
