"""Measures the pictures of a running pipeline over HTTP, by load.

    omni-actors launch z_image_turbo --http 127.0.0.1:8000
    python benchmarks/pictures.py --http http://127.0.0.1:8000 --concurrency 1 8 --sizes 512x512 1024x1024 2048x2048

Closed loop, as in serve.py: always so many requests in flight, whose sizes take turns. Columns, each 'p50 / p95 / p99':
`first_progress_ms` is the time from the request to its first finished step, `step_ms` that between steps as the client
learns of them, on average of a picture, `after_ms` that from the last step to the whole picture at the client, and
`picture_s` from the request to it, for all and by size; `pictures_per_s` is the throughput.
A warm-up round precedes each load. With `--references N` each picture is made from N others,
noise of 1024 x 1024 pixels, where the model takes any (qwen_image). With `--during 2048x2048` one picture of that size
is always in the making, too, which the figures leave out. `--json FILE` writes the results with versions and flags.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy
import workload
from askers import events, http_client
from PIL import Image


@dataclass
class Picture:
    """One answer: seconds since its submission."""

    size: str
    first_progress: float = 0.0
    last_progress: float = 0.0
    steps: int = 0
    total: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of a step, after the first."""
        return (self.last_progress - self.first_progress) / max(self.steps - 1, 1)

    @property
    def after(self) -> float:
        """Seconds from the last step to the whole picture."""
        return self.total - self.last_progress


def noise(seed: int) -> bytes:
    """A PNG file of 1024 x 1024 pixels."""
    sink = io.BytesIO()
    pixels = numpy.random.default_rng(seed).integers(0, 256, (1024, 1024, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(sink, "PNG")
    return sink.getvalue()


def form(fields: dict[str, Any], files: Sequence[bytes]) -> aiohttp.FormData:
    """A body with files, as /v1/images/edits takes it."""
    data = aiohttp.FormData()
    for name, value in fields.items():
        data.add_field(name, str(value).lower() if isinstance(value, bool) else str(value))
    for index, file in enumerate(files):
        data.add_field("image[]", file, filename=f"{index}.png", content_type="image/png")
    return data


class Orders:
    """Asks for pictures whose sizes take turns, each with a prompt and a seed of its own."""

    def __init__(self, client: aiohttp.ClientSession, options: argparse.Namespace, sizes: Sequence[str]) -> None:
        self._client = client
        self._sizes = itertools.cycle(sizes)
        self._numbers = itertools.count()
        self._body: dict[str, Any] = {"stream": True, "progress": True, "num_inference_steps": options.steps}
        more = {"guidance_scale": options.guidance, "negative_prompt": options.negative_prompt}
        self._body |= {name: value for name, value in more.items() if value is not None}
        self._files = [noise(index) for index in range(options.references)]

    async def __call__(self, index: int) -> Picture:
        """Raises `RuntimeError` for an answer without a picture."""
        picture, number = Picture(next(self._sizes)), next(self._numbers)
        body = self._body | {"prompt": workload.prompt(number), "seed": number, "size": picture.size}
        path, sent = "/v1/images/generations", body
        if self._files:
            path, sent = "/v1/images/edits", form(body, self._files)
        began = time.perf_counter()
        async for came, event in events(self._client, path, sent):
            if event["type"].endswith(".progress"):
                picture.first_progress = picture.first_progress or came - began
                picture.last_progress = came - began
                picture.steps = event["step"]
            elif event["type"].endswith(".completed"):
                picture.total = came - began
        if not picture.total:
            raise RuntimeError("The answer was cut short.")
        return picture


@contextlib.asynccontextmanager
async def others(order: Orders | None) -> AsyncIterator[None]:
    """One further picture is in the making all the time."""

    async def again() -> None:
        while order is not None:
            await order(0)

    task = asyncio.create_task(again())
    try:
        yield
        if order is not None and task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def summary(load: str, pictures: Sequence[Picture], wall: float) -> dict[str, Any]:
    """A row of the table. Pictures of one step report no progress."""
    row: dict[str, Any] = {
        "load": load,
        "pictures": len(pictures),
        "pictures_per_s": round(len(pictures) / wall, 3),
        "steps": max(picture.steps for picture in pictures) or 1,
    }
    if firsts := [1000 * picture.first_progress for picture in pictures if picture.steps]:
        row["first_progress_ms"] = workload.quantiles(firsts, 0)
        row["step_ms"] = workload.quantiles([1000 * picture.step for picture in pictures], 1)
        row["after_ms"] = workload.quantiles([1000 * picture.after for picture in pictures], 0)
    row["picture_s"] = workload.quantiles([picture.total for picture in pictures], 3)
    sizes = sorted({picture.size for picture in pictures}, key=lambda size: int(size.partition("x")[0]))
    for size in sizes if len(sizes) > 1 else ():
        row[f"{size}_s"] = workload.quantiles([picture.total for picture in pictures if picture.size == size], 3)
    return row


async def main(options: argparse.Namespace) -> None:
    rows = []
    async with http_client(options.http, options.timeout) as client:
        for concurrency in options.concurrency:
            order = Orders(client, options, options.sizes)
            await workload.closed_loop(order, concurrency, max(concurrency, len(options.sizes)))
            count = max(options.rounds * concurrency, 3 * len(options.sizes))
            large = Orders(client, options, [options.during]) if options.during else None
            async with others(large):
                pictures, wall = await workload.closed_loop(order, concurrency, count)
            during = f" during {options.during}" if options.during else ""
            rows.append(summary(f"c={concurrency}{during}", pictures, wall))
            print(json.dumps(rows[-1]), flush=True)
    print(f"{workload.table(rows)}\n{workload.versions_line()}")
    if options.json:
        options.json.write_text(workload.report(rows))


def size(text: str) -> str:
    """WIDTHxHEIGHT. Raises `ArgumentTypeError` for anything else."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"a size is WIDTHxHEIGHT, such as 1024x1024; got {text!r}")
    return text


def positive(text: str) -> int:
    """A whole number of at least 1. Raises `ArgumentTypeError` for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number of at least 1; got {text!r}")
    return int(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", required=True, metavar="URL", help="the running pipeline's HTTP server")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=positive, default=3, help="pictures per concurrency = rounds * concurrency")
    parser.add_argument("--sizes", type=size, nargs="+", default=["1024x1024"], help="they take turns")
    parser.add_argument("--during", type=size, help="one picture of this size is always in the making, too")
    parser.add_argument("--steps", type=positive, default=8)
    parser.add_argument("--guidance", type=float, help="guidance_scale; the pipeline's without this")
    parser.add_argument("--negative-prompt", help="which qwen_image needs for guidance")
    parser.add_argument("--references", type=int, default=0, help="pictures that each picture is made from")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    asyncio.run(main(parser.parse_args()))
