"""HTTP servers for tests: with a pipeline, or inside the test's process in front of a running pipeline."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import numpy
import soundfile
import uvicorn
from openai import OpenAI
from PIL import Image
from starlette.types import ASGIApp

from tests.support.paths import REPOSITORY
from tests.support.pipelines import RunningPipeline
from tests.support.waiting import PATIENCE, until

ECHO = "stage_configs/echo.yaml"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that stays free until it is used: the kernel gives those from 32768 on to others meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((host, port))
            return port


CLIENTS: list[OpenAI] = []


def openai_client(url: str, **options: object) -> OpenAI:
    """The client as users make it, without its retries: they would hide errors. It lives until `close_clients`."""
    CLIENTS.append(OpenAI(base_url=f"{url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 240, **options}))
    return CLIENTS[-1]


def close_clients() -> None:
    """Close the clients of a test.

    The garbage collector may end a client's sockets before the client itself, and then warns of them in any later test.
    """
    while CLIENTS:
        CLIENTS.pop().close()


class HttpPipeline(RunningPipeline):
    """A pipeline started with --http; `url` is where it listens."""

    def __init__(
        self,
        config: str | Path = ECHO,
        overrides: Mapping[str, object] | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(
            config, overrides, arguments=["--http", f"127.0.0.1:{port}", *arguments], environment=environment
        )
        wait_healthy(self.url)

    def openai(self, **options: object) -> OpenAI:
        return openai_client(self.url, **options)

    def log(self) -> str:
        return (self.run_dir / "logs" / "http.log").read_text()


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omni_actors.launch", "stage_configs/echo.yaml", *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


def wait_healthy(url: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds * PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.05)
    raise RuntimeError(f"{url} is not healthy after {seconds} s")


@contextlib.contextmanager
def serving(app: ASGIApp, **options: object) -> Iterator[str]:
    """Serve an application from a thread of this process; gives its URL."""
    settings = {"loop": "asyncio", "ws": "none", **options}
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", **settings))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, 10, "the server to listen")
    scheme = "https" if "ssl_certfile" in options else "http"
    try:
        yield f"{scheme}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def tone(seconds: float, rate: int = 16_000) -> numpy.ndarray:
    return (0.3 * numpy.sin(2 * numpy.pi * 330 * numpy.arange(int(seconds * rate)) / rate)).astype(numpy.float32)


def sound(seconds: float = 0.5, rate: int = 16_000, format: str = "WAV") -> bytes:
    """A sound file."""
    sink = io.BytesIO()
    soundfile.write(sink, tone(seconds, rate), rate, format=format)
    return sink.getvalue()


def data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def picture(width: int = 64, height: int = 64, format: str = "PNG") -> bytes:
    """An image file."""
    sink = io.BytesIO()
    noise = numpy.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=numpy.uint8)
    Image.fromarray(noise).save(sink, format)
    return sink.getvalue()


def pdf(*pages: str, password: str = "", owner: str = "") -> bytes:
    """A PDF with a line of text on each page; with passwords to read it, and to do more."""
    from pypdf import PdfWriter

    numbers = range(4, 4 + 2 * len(pages), 2)
    kids = " ".join(f"{number} 0 R" for number in numbers)
    objects = {
        1: "<</Type/Catalog/Pages 2 0 R>>",
        2: f"<</Type/Pages/Count {len(pages)}/Kids[{kids}]/MediaBox[0 0 200 200]/Resources<</Font<</F 3 0 R>>>>>>",
        3: "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    }
    for number, line in zip(numbers, pages, strict=True):
        content = f"BT /F 12 Tf 20 100 Td ({line}) Tj ET"
        objects[number] = f"<</Type/Page/Parent 2 0 R/Contents {number + 1} 0 R>>"
        objects[number + 1] = f"<</Length {len(content)}>>stream\n{content}\nendstream"
    plain = "%PDF-1.4\n" + "".join(f"{number} 0 obj{each}endobj\n" for number, each in objects.items())
    data = f"{plain}trailer<</Size {len(objects) + 1}/Root 1 0 R>>\nstartxref\n0\n%%EOF".encode()
    if not password and not owner:
        return data
    writer, sink = PdfWriter(clone_from=io.BytesIO(data)), io.BytesIO()
    writer.encrypt(password, owner or None, algorithm="AES-256")
    writer.write(sink)
    return sink.getvalue()


def film(seconds: float = 1.0, side: int = 64, *, with_sound: bool = False) -> bytes:
    """A video file (MPEG-4), 10 frames a second; its sound is AAC at 16 kHz."""
    import av

    sink = io.BytesIO()
    with av.open(sink, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        track = container.add_stream("aac", rate=16_000, layout="mono") if with_sound else None
        for index in range(int(10 * seconds)):
            frame = av.VideoFrame.from_ndarray(numpy.full((side, side, 3), 20 * index % 256, numpy.uint8), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if track is not None:
            frame = av.AudioFrame.from_ndarray(tone(seconds)[None], "fltp", "mono")
            frame.sample_rate = 16_000
            container.mux(track.encode(frame))
            container.mux(track.encode())
    return sink.getvalue()
