"""Measures how soon an answer to a large request begins: from the last byte of its body to the first text.

    python benchmarks/upload.py stage_configs/qwen2_5_omni.yaml --model DIR [--mbit 100] [--times 5]
    python benchmarks/upload.py --url http://127.0.0.1:8000

The body is a chat with a video, a sound and three pictures, 20 MB of base64 in all, sent in time over a connection of
`--mbit`. Media are decoded while the rest of the body arrives, so most of it is done at the last byte. `--at-once`
sends as fast as the server reads. Every request has media of its own, so that nothing is in a cache.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import av
import command_line
import http_target
import numpy
import soundfile
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.servers import HttpPipeline

PIECE = 1 << 16  # bytes that are sent at a time
PATIENCE = 300.0  # seconds for an answer
PICTURES, WIDTH, HEIGHT = 3, 2600, 1900
SOUND_SECONDS, SOUND_RATE = 20, 48_000
FILM_SECONDS, FILM_WIDTH, FILM_HEIGHT, FILM_RATE = 10, 1280, 720, 24
FILM_BITS = 4_500_000  # a second


def noise(chance: numpy.random.Generator, height: int, width: int) -> numpy.ndarray:
    """A picture that compresses about as photos do: u8 [height, width, 3]."""
    coarse = chance.integers(0, 255, (height // 16 + 1, width // 16 + 1, 3), dtype=numpy.uint8)
    smooth = numpy.kron(coarse, numpy.ones((16, 16, 1), numpy.uint8))[:height, :width]
    grain = chance.integers(0, 32, (height, width, 3), dtype=numpy.uint8)
    return (smooth // 2 + grain).astype(numpy.uint8)


def picture(chance: numpy.random.Generator) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(noise(chance, HEIGHT, WIDTH)).save(sink, "JPEG", quality=93)
    return sink.getvalue()


def sound(chance: numpy.random.Generator) -> bytes:
    samples = 0.1 * chance.standard_normal((SOUND_SECONDS * SOUND_RATE, 2))
    sink = io.BytesIO()
    soundfile.write(sink, samples, SOUND_RATE, format="WAV", subtype="PCM_16")
    return sink.getvalue()


def film(chance: numpy.random.Generator, seconds: int) -> bytes:
    sink = io.BytesIO()
    base = noise(chance, FILM_HEIGHT, FILM_WIDTH)
    with av.open(sink, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=FILM_RATE)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = FILM_WIDTH, FILM_HEIGHT, "yuv420p", FILM_BITS
        for index in range(seconds * FILM_RATE):
            frame = av.VideoFrame.from_ndarray(numpy.roll(base, 7 * index, axis=1), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return sink.getvalue()


def body(seed: int, pictures: int, film_seconds: int) -> bytes:
    """A request with media that no other seed has."""
    chance = numpy.random.default_rng(seed)

    def uri(kind: str, data: bytes) -> str:
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"

    parts: list[dict[str, Any]] = [
        {"type": "video_url", "video_url": {"url": uri("video/mp4", film(chance, film_seconds))}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound(chance)).decode(), "format": "wav"}},
    ]
    for _ in range(pictures):
        parts.append({"type": "image_url", "image_url": {"url": uri("image/jpeg", picture(chance))}})
    parts.append({"type": "text", "text": "What is all this?"})
    request = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "stream": True}
    return json.dumps(request).encode()


async def ask(url: str, sent: bytes, bytes_per_second: float) -> tuple[float, float]:
    """Milliseconds that the body took, and those from its last byte to the first text."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    async with asyncio.timeout(PATIENCE):
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n".encode())
        began = time.perf_counter()
        for start in range(0, len(sent), PIECE):
            writer.write(sent[start : start + PIECE])
            await writer.drain()
            await asyncio.sleep(max(0.0, began + (start + PIECE) / bytes_per_second - time.perf_counter()))
        ended = time.perf_counter()
        received = b""
        while line := await reader.readline():
            received += line
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices")
                if choices and choices[0]["delta"].get("content"):
                    writer.close()
                    return 1000 * (ended - began), 1000 * (time.perf_counter() - ended)
    raise SystemExit(f"no text came: {received[-2000:].decode()}")


async def measure(url: str, options: argparse.Namespace) -> list[tuple[int, float, float]]:
    """Size of each body, its time on the way, and from its last byte to the first text, both in ms."""
    speed = float("inf") if options.at_once else options.mbit * 1e6 / 8
    rows = []
    for number in range(options.times + 1):
        sent = body(options.seed + number, options.pictures, options.film_seconds)
        rows.append((len(sent), *await ask(url, sent, speed)))
    return rows[1:]  # the first one warms up


def main() -> None:
    parser = http_target.parser_of(__doc__)
    parser.add_argument("--mbit", type=float, default=100.0, help="of the client's connection, a second")
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--pictures", type=int, default=PICTURES)
    parser.add_argument("--film-seconds", type=int, default=FILM_SECONDS)
    parser.add_argument("--times", type=int, default=5, help="requests, after one that is not counted")
    parser.add_argument("--seed", type=int, default=0)
    options = http_target.parse(parser)
    if options.url is not None:
        rows = asyncio.run(measure(options.url, options))
    else:
        with HttpPipeline(options.config, command_line.overrides(options)) as pipeline:
            rows = asyncio.run(measure(pipeline.url, options))
    sizes, sending, waiting = zip(*rows, strict=True)
    print("| body MB | sent in s | last byte to first text ms: median | least | most |\n|---|---|---|---|---|")
    size, seconds = statistics.median(sizes) / 1e6, statistics.median(sending) / 1000
    print(
        f"| {size:.1f} | {seconds:.2f} | {statistics.median(waiting):.0f} | {min(waiting):.0f} | {max(waiting):.0f} |"
    )


if __name__ == "__main__":
    main()
