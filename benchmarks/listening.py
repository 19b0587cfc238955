"""Measures how soon is written down what many people say, while they say it.

    python benchmarks/listening.py --speech a.pcm b.pcm [--url URL] [--people 16 64 128 256] [--seconds 30]

Everybody has a session of the type `transcription` and a microphone that is always on: turns of 3 to 12 s of the
recordings (PCM, 24 kHz), with a second of silence behind each. The server writes down what it has of a turn again and
again, so what was said is in a transcript after the rest of the interval between two of these, and the time of one:
`sound to transcript`, at any moment, from the server's metrics. `first delta` is that after the turn was found,
`completed` that after its end was found, both as clients see them; `late` says how far this client was behind.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import time
from pathlib import Path
from typing import Any

import httpx
import workload
from websockets.asyncio.client import ClientConnection, connect

RATE = 24_000
PIECE_SECONDS = 0.04
PIECE = int(RATE * PIECE_SECONDS) * 2  # bytes
AUDIO = "input_audio_buffer"
TRANSCRIPTION = "conversation.item.input_audio_transcription"


def pieces_of(pcm: bytes) -> list[str]:
    """Sound as events, made once: the client shares its host with the server."""
    cut = [pcm[start : start + PIECE].ljust(PIECE, b"\0") for start in range(0, len(pcm), PIECE)]
    return [json.dumps({"type": f"{AUDIO}.append", "audio": base64.b64encode(piece).decode()}) for piece in cut]


class Person:
    """One session, and the times of its events in seconds."""

    def __init__(self, recordings: list[list[str]], seed: int) -> None:
        self._recordings = recordings
        self._random = random.Random(seed)
        self._silence = pieces_of(bytes(PIECE)) * int(1 / PIECE_SECONDS)
        self.first: list[float] = []
        self.completed: list[float] = []
        self.late: list[float] = []
        self.early = self.failed = 0

    async def talk(self, url: str, until: float) -> None:
        """Talk until a moment of the monotonic clock."""
        address = f"{url.replace('http', 'ws', 1)}/v1/realtime?intent=transcription"
        async with connect(address, compression=None, max_size=None, open_timeout=30) as websocket:
            listener = asyncio.create_task(self._listen(websocket))
            try:
                await self._speak(websocket, until)
            finally:
                listener.cancel()
                await asyncio.gather(listener, return_exceptions=True)

    async def _speak(self, websocket: ClientConnection, until: float) -> None:
        due = time.monotonic() + 2 * self._random.random()
        while due < until:
            said = [piece for _ in range(self._random.randint(1, 3)) for piece in self._random.choice(self._recordings)]
            for piece in [*said, *self._silence]:
                await asyncio.sleep(due - time.monotonic())
                self.late.append(max(0.0, time.monotonic() - due))
                await websocket.send(piece)
                due += PIECE_SECONDS

    async def _listen(self, websocket: ClientConnection) -> None:
        began, ended, waiting = 0.0, {}, False
        async for text in websocket:
            event, now = json.loads(text), time.monotonic()
            match event["type"].removeprefix(f"{AUDIO}.").removeprefix(f"{TRANSCRIPTION}."):
                case "speech_started":
                    began, waiting = now, True
                case "speech_stopped":
                    ended[event["item_id"]], waiting = now, False
                case "delta" if event["item_id"] not in ended:
                    self.early += 1
                    self.first += [now - began] if waiting else []
                    waiting = False
                case "completed":
                    self.completed.append(now - ended.pop(event["item_id"], now))
                case "failed" | "error":
                    self.failed += 1


def buckets(metrics: str, name: str) -> dict[float, float]:
    """The counts of a histogram by upper bound, of all its rows."""
    found: dict[float, float] = {}
    for line in metrics.splitlines():
        if line.startswith(f"{name}_bucket"):
            bound = float(line.partition('le="')[2].partition('"')[0])
            found[bound] = found.get(bound, 0.0) + float(line.rpartition(" ")[2])
    return found


def quantile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """A quantile of what came between two readings, evenly spread within its bucket; nan if nothing came."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total, low, below = max(counts.values(), default=0.0), 0.0, 0.0
    for bound, count in counts.items():
        if total and count >= share * total:
            return low + (bound - low) * (share * total - below) / max(count - below, 1.0)
        low, below = bound, count
    return float("nan")


def of(values: list[float], share: float) -> float:
    """A quantile of values; nan of none."""
    return sorted(values)[int(share * (len(values) - 1))] if values else float("nan")


async def measure(url: str, count: int, recordings: list[list[str]], seconds: float) -> dict[str, Any]:
    """One row: `count` people for so long, without the first quarter."""
    people = [Person(recordings, seed) for seed in range(count)]
    began = time.monotonic()
    async with httpx.AsyncClient(timeout=30) as http, asyncio.TaskGroup() as group:
        for person in people:
            group.create_task(person.talk(url, began + seconds))
        await asyncio.sleep(seconds / 4)
        before, since = (await http.get(f"{url}/metrics")).text, time.monotonic()
        await asyncio.sleep(began + seconds - time.monotonic())
        after, took = (await http.get(f"{url}/metrics")).text, time.monotonic() - since
    times = [buckets(metrics, "omni_request_seconds") for metrics in (before, after)]
    rate = (max(times[1].values()) - max(times[0].values(), default=0.0)) / took
    lag = [buckets(metrics, "omni_realtime_detection_lag_seconds") for metrics in (before, after)]
    interval = count / rate if rate else float("nan")
    one = [quantile(*times, share) for share in (0.5, 0.95)]
    row = {
        "people": count,
        "transcripts a second": round(rate, 1),
        "one takes p50 / p95": f"{one[0]:.3f} / {one[1]:.3f}",
        "sound to transcript p50 / p95": f"{interval / 2 + one[0]:.3f} / {0.95 * interval + one[1]:.3f}",
    }
    for name, shares in (("first", (0.5, 0.95)), ("completed", (0.5, 0.95)), ("late", (0.99,))):
        values = [value for person in people for value in getattr(person, name)]
        row[name] = " / ".join(f"{of(values, share):.3f}" for share in shares)
    row["detection lag p95"] = f"{quantile(*lag, 0.95):.3f}"
    row["turns"] = sum(len(person.completed) for person in people)
    row["early deltas"] = sum(person.early for person in people)
    row["failed"] = sum(person.failed for person in people)
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--speech", nargs="+", type=Path, required=True)
    parser.add_argument("--people", nargs="+", type=int, default=[16, 64, 128, 256])
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    recordings = [pieces_of(path.read_bytes()) for path in options.speech]
    rows = []
    for count in options.people:
        rows.append(asyncio.run(measure(options.url, count, recordings, options.seconds)))
        print(workload.table(rows[-1:]), flush=True)
    print(workload.table(rows))
