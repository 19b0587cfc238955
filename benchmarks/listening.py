"""Measures how soon an answer comes after a spoken turn, with the turn computed while the user speaks and without.

    python benchmarks/listening.py stage_configs/qwen2_5_omni.yaml --model DIR [--seconds 4 8 16] [--times 5]
    python benchmarks/listening.py --url http://127.0.0.1:8000

Sound is sent to /v1/realtime in time, a piece of 100 ms every 100 ms; the clock starts with the commit after the last
one. Every turn is a session of its own with sound of its own, so that nothing is in a cache. With a configuration, the
pipeline is started twice, with `http.realtime_ahead_seconds` 0 and 2; with `--url`, the server is measured as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import command_line
import http_target
from websockets.asyncio.client import connect

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omni_actors.http_server.realtime.config import RATE
from tests.support.realtime import speech
from tests.support.servers import HttpPipeline

PIECE_SECONDS = 0.1
PATIENCE = 120.0  # seconds for an answer
TEXT = ("response.output_audio_transcript.delta", "response.output_text.delta")
SOUND = "response.output_audio.delta"
STAGES = {"thinker": {"max_tokens": 16, "min_tokens": 16}, "talker": {"max_tokens": 40}}


async def turn(url: str, seconds: float, seed: int) -> tuple[float, float]:
    """Milliseconds from the end of a turn to the first text and the first sound of its answer."""
    pcm = speech(seconds, seed).tobytes()
    size = 2 * int(PIECE_SECONDS * RATE)
    async with (
        connect(url.replace("http", "ws", 1) + "/v1/realtime", max_size=None) as websocket,
        asyncio.timeout(seconds + PATIENCE),
    ):

        async def send(kind: str, **fields: Any) -> None:
            await websocket.send(json.dumps({"type": kind, **fields}))

        session = {"type": "realtime", "audio": {"input": {"turn_detection": None}}, "stage_params": STAGES}
        await send("session.update", session={**session, "instructions": "Answer the user."})
        began = time.monotonic()
        for number, start in enumerate(range(0, len(pcm), size)):
            await asyncio.sleep(max(0.0, began + (number + 1) * PIECE_SECONDS - time.monotonic()))
            piece = base64.b64encode(pcm[start : start + size]).decode()
            await send("input_audio_buffer.append", audio=piece)
        await send("input_audio_buffer.commit")
        await send("response.create")
        ended = time.monotonic()
        first: dict[str, float] = {}
        while True:
            event = json.loads(await websocket.recv())
            kind = "text" if event["type"] in TEXT else event["type"]
            first.setdefault(kind, 1000 * (time.monotonic() - ended))
            if kind == "error":
                raise SystemExit(f"the server refuses: {event['error']['message']}")
            if kind == "response.done":
                return first.get("text", float("nan")), first.get(SOUND, float("nan"))


async def measure(url: str, options: argparse.Namespace) -> dict[float, tuple[float, float]]:
    """Medians by the length of the turn, after a turn that is not counted."""
    await turn(url, min(options.seconds), seed=0)
    found = {}
    for seconds in options.seconds:
        turns = [await turn(url, seconds, seed=int(1000 * seconds) + number) for number in range(options.times)]
        texts, sounds = zip(*turns, strict=True)
        found[seconds] = statistics.median(texts), statistics.median(sounds)
    return found


def pipelines(options: argparse.Namespace) -> dict[str, dict[float, tuple[float, float]]]:
    """What was measured, by how the server is configured."""
    if options.url is not None:
        return {"as it is": asyncio.run(measure(options.url, options))}
    given, found = command_line.overrides(options), {}
    for name, seconds in (("after the turn", 0), ("while it lasts", 2)):
        with HttpPipeline(options.config, {**given, "http.realtime_ahead_seconds": seconds}) as pipeline:
            found[name] = asyncio.run(measure(pipeline.url, options))
    return found


def main() -> None:
    parser = http_target.parser_of(__doc__)
    parser.add_argument("--seconds", type=float, nargs="+", default=[4.5, 8.5, 16.5], help="lengths of turns")
    parser.add_argument("--times", type=int, default=5, help="turns of each length")
    options = http_target.parse(parser)
    print("| turn computed | seconds | first text ms | first sound ms |\n|---|---|---|---|")
    for name, rows in pipelines(options).items():
        for seconds, (text, sound) in rows.items():
            print(f"| {name} | {seconds:g} | {text:.0f} | {sound:.0f} |")


if __name__ == "__main__":
    main()
