"""Measures how soon an answer ends in every stage when the user speaks into it.

    python benchmarks/barge_in.py [--url http://127.0.0.1:8000] [--times 20]

A session of /v1/realtime is asked for a long answer. Once the answer runs, speech is sent as a microphone gives it, a
piece of 32 ms every 32 ms. Without `--url`, a pipeline of echo stages is started, 20 steps a second.
The server must run on this host: the ends of the stages are moments of its clock, from the requests' timelines.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import workload
from websockets.asyncio.client import ClientConnection, connect

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.realtime import WINDOW, speech
from tests.support.servers import HttpPipeline

PIECE = 2 * WINDOW  # bytes
PIECE_SECONDS = 0.032
PATIENCE = 60.0  # seconds for any one wait
ECHO = {f"stages.{stage}.engine.step_seconds": 0.05 for stage in ("thinker", "code2wav")}
QUESTION = "Tell me everything that you know about the sea, at length. " * 8


class Talk:
    """A session whose events are noted with the time of their arrival."""

    def __init__(self, websocket: ClientConnection) -> None:
        self._websocket = websocket
        self.last_sound = 0.0

    async def send(self, kind: str, **fields: Any) -> None:
        await self._websocket.send(json.dumps({"type": kind, **fields}))

    async def until(self, *kinds: str) -> tuple[float, dict[str, Any]]:
        """The next event of one of these kinds, and when it came (Unix time)."""
        async with asyncio.timeout(PATIENCE):
            while True:
                event = json.loads(await self._websocket.recv())
                now = time.time()
                if event["type"] == "error":
                    raise SystemExit(f"the server refuses: {event['error']['message']}")
                if event["type"] == "response.output_audio.delta":
                    self.last_sound = now
                if event["type"] in kinds:
                    return now, event


async def speak(talk: Talk, pcm: bytes) -> None:
    """Send sound in time."""
    began = time.monotonic()
    for number, start in enumerate(range(0, len(pcm), PIECE)):
        await talk.send("input_audio_buffer.append", audio=base64.b64encode(pcm[start : start + PIECE]).decode())
        await asyncio.sleep(max(0.0, began + (number + 1) * PIECE_SECONDS - time.monotonic()))


async def interrupt(url: str, http: httpx.AsyncClient) -> Mapping[str, float]:
    """Milliseconds of one interruption, by name."""
    async with connect(url.replace("http", "ws", 1) + "/v1/realtime", max_size=None) as websocket:
        talk = Talk(websocket)
        _, created = await talk.until("session.created")
        detection = created["session"]["audio"]["input"]["turn_detection"]
        if detection is None:
            raise SystemExit("The server does not find turns: install omni_actors[realtime].")
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
        await talk.send("conversation.item.create", item=item)
        await talk.send("response.create")
        _, response = await talk.until("response.created")
        await talk.until("response.output_audio_transcript.delta", "response.output_text.delta")
        began = time.time()
        speaking = asyncio.create_task(speak(talk, speech(1.5).tobytes()))
        noticed, _ = await talk.until("input_audio_buffer.speech_started")
        ended, done = await talk.until("response.done")
        if done["response"]["status"] != "cancelled":
            raise SystemExit(f"the answer was {done['response']['status']} before it was interrupted: ask for more")
        await speaking
    timeline = await ended_timeline(url, http, response["response"]["id"])
    stages = {
        f"{stage['stage']} has ended": timeline["started"] + stage["at"] + stage["seconds"] - noticed
        for stage in timeline["stages"]
    }
    found = {
        "speech is noticed, after its first sample": noticed - began,
        "response.done": ended - noticed,
        "the last sound": max(talk.last_sound - noticed, 0.0),
        **stages,
        "every stage has ended": max(stages.values()),
    }
    return {name: 1000 * seconds for name, seconds in found.items()}


async def ended_timeline(url: str, http: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    """The timeline of a request that has ended in all stages, whose reports come a little later."""
    wanted = {stage["stage"] for stage in (await http.get(f"{url}/v1/status")).json()["stages"]}
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        answer = await http.get(f"{url}/v1/requests/{request_id}/timeline")
        if answer.status_code == 200:
            timeline: dict[str, Any] = answer.json()
            ended = {stage["stage"] for stage in timeline["stages"] if stage["outcome"] != "running"}
            if ended == wanted:
                return timeline
        await asyncio.sleep(0.1)
    raise SystemExit(f"the request {request_id} has no complete timeline after {PATIENCE} s")


async def measure(url: str, times: int) -> None:
    async with httpx.AsyncClient() as http:
        found = [await interrupt(url, http) for _ in range(times)]
    title = "ms from the moment at which speech is noticed: p50 / p95 / p99"
    print(workload.table([{title: name, "": workload.quantiles([one[name] for one in found], 0)} for name in found[0]]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server on this host; by default one of echo stages is started")
    parser.add_argument("--times", type=int, default=20, help="interruptions to measure")
    options = parser.parse_args()
    with contextlib.nullcontext(options) if options.url else HttpPipeline(overrides=ECHO) as server:
        asyncio.run(measure(server.url, options.times))
