"""200 streams at once, text and speech, through one HTTP process and four echo stages."""

from __future__ import annotations

import asyncio
import base64

import httpx
import msgspec
import pytest

from tests.support.servers import HttpPipeline

STREAMS = 200
TEXT = "the sea is calm tonight, the tide is full"  # 41 tokens, 0.82 s of audio
SAMPLES = 480 * len(TEXT)
BODY = {
    "model": "echo",
    "stream": True,
    "modalities": ["text", "audio"],
    "messages": [{"role": "user", "content": TEXT}],
}


async def one(client: httpx.AsyncClient) -> tuple[str, int, bool]:
    """Text and samples of a stream, and whether it is complete."""
    text, samples, done = "", 0, False
    async with client.stream("POST", "/v1/chat/completions", json=BODY) as answer:
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line:
                for choice in msgspec.json.decode(line.removeprefix("data: "))["choices"]:
                    audio = choice["delta"].get("audio") or {}
                    text += audio.get("transcript") or ""
                    samples += len(base64.b64decode(audio.get("data") or "")) // 2
    return text, samples, done


@pytest.mark.nightly
async def test_two_hundred_streams_at_once(echo: HttpPipeline) -> None:
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=echo.url, timeout=120, limits=limits) as client:
        seen = await asyncio.gather(*(one(client) for _ in range(STREAMS)))
    assert seen == [(TEXT, SAMPLES, True)] * STREAMS
