"""Sends the workload's requests to a pipeline: through our client, or over HTTP as OpenAI's clients do."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import workload
from workload import Sample

from omni_actors.client import AsyncOmniClient, Audio, Text
from omni_actors.client.streams import RequestStream

SAMPLE_RATE = 24_000
SAMPLE_BYTES = 2  # of pcm16


def http_client(url: str, timeout: float) -> aiohttp.ClientSession:
    """A client that is not itself the bottleneck: httpx's pool is, from some 30 requests at a time on."""
    return aiohttp.ClientSession(
        url or None,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout),
        read_bufsize=1 << 23,
    )


async def events(
    client: aiohttp.ClientSession, route: str, body: dict[str, Any] | aiohttp.FormData
) -> AsyncIterator[tuple[float, Any]]:
    """The events of a streamed answer to JSON or a form, each with the moment by `perf_counter` at which it came.

    Raises:
        RuntimeError: the server refuses the request, or an event is an error.
    """
    sent: dict[str, Any] = {"data": body} if isinstance(body, aiohttp.FormData) else {"json": body}
    async with client.post(route, **sent) as response:
        if not response.ok:
            raise RuntimeError(await response.text(errors="replace"))
        async for now, line in _lines(response.content):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            yield now, event


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[tuple[float, bytes]]:
    """Lines with the moments at which they came; aiohttp's own copy a line of many pieces once for each of them."""
    pieces: list[bytes] = []
    async for piece in content.iter_any():
        now = time.perf_counter()
        *ended, rest = piece.split(b"\n")
        for end in ended:
            yield now, b"".join((*pieces, end))
            pieces.clear()
        pieces.append(rest)


class Asker:
    """Makes requests whose answers have the lengths of `options`; subclasses send them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        # Another run against the same pipeline asks something else: the thinker keeps the prefixes of prompts.
        self._numbers = itertools.count(secrets.randbelow(90_000) + 10_000)
        # With min_tokens the end tokens are not sampled; if they were ignored instead, they would reach the vocoder.
        count = options.text_tokens
        self._params = {"thinker": {"max_tokens": count, "min_tokens": count, "temperature": 0.0}}
        if options.codec_tokens:
            self._params["talker"] = {"max_tokens": options.codec_tokens, "min_tokens": options.codec_tokens}
        self._modalities = ["text", "audio"] if options.codec_tokens else ["text"]

    def prompt(self) -> str:
        """The next thing to ask."""
        return workload.prompt(next(self._numbers), self._options.prompt_repeats)


class ClientAsker(Asker):
    """Asks over ZMQ."""

    def __init__(self, client: AsyncOmniClient, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._client = client

    async def __call__(self, index: int) -> Sample:
        began = time.perf_counter()
        given = {"modalities": self._modalities, "params": self._params, "timeout": self._options.timeout}
        return await self._heard(await self._client.submit(self.prompt(), seed=index, **given), began)

    async def _heard(self, stream: RequestStream, began: float) -> Sample:
        sample = Sample()
        async for item in stream:
            now = time.perf_counter() - began
            if isinstance(item, Text):
                sample.first_text = sample.first_text or now
                sample.text_tokens += len(item.token_ids)
            elif isinstance(item, Audio):
                sample.playback.add(now, len(item.samples) / item.sample_rate)
        sample.total = time.perf_counter() - began
        sample.stages = {stage: (usage.first_output, usage.finished) for stage, usage in stream.usage.items()}
        sample.prompt_tokens = stream.usage["thinker"].input_tokens if "thinker" in stream.usage else 0
        return sample


class WordsAsker(ClientAsker):
    """Has texts spoken while they are written, a word each `--word-seconds`; times count from the third word."""

    async def __call__(self, index: int) -> Sample:
        params = {"talker": self._params["talker"]}
        given = {"modalities": ["audio"], "params": params, "timeout": self._options.timeout}
        stream = await self._client.submit("", more_text=True, seed=index, **given)
        began = time.perf_counter() + 2 * self._options.word_seconds
        writing = asyncio.create_task(self._write(stream, self.prompt().split()))
        sample = await self._heard(stream, began)
        await writing
        return sample

    async def _write(self, stream: RequestStream, words: list[str]) -> None:
        for word in words:
            await stream.append_text(f"{word} ")
            await asyncio.sleep(self._options.word_seconds)
        await stream.end_text()


class HttpAsker(Asker):
    """Asks over HTTP: a streamed chat completion, its sound as pcm16 in base64."""

    def __init__(self, client: aiohttp.ClientSession, model: str, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._client = client
        self._body: dict[str, Any] = {"model": model, "modalities": self._modalities, "stage_params": self._params}
        self._body |= {"stream": True, "stream_options": {"include_usage": True}}

    async def __call__(self, index: int) -> Sample:
        began = time.perf_counter()
        sample = Sample()
        body = self._body | {"messages": [{"role": "user", "content": self.prompt()}], "seed": index}
        usage: dict[str, Any] | None = None
        async for came, event in events(self._client, "/v1/chat/completions", body):
            now = came - began
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                audio = choice["delta"].get("audio") or {}
                if choice["delta"].get("content") or audio.get("transcript"):
                    sample.first_text = sample.first_text or now
                if data := audio.get("data"):
                    size = len(data) // 4 * 3 - data[-2:].count("=")
                    sample.playback.add(now, size / SAMPLE_BYTES / SAMPLE_RATE)
        sample.total = time.perf_counter() - began
        if usage is None:
            raise RuntimeError("The answer was cut short.")
        sample.text_tokens, sample.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        sample.stages = {
            stage: (times["first_output"], times["finished"]) for stage, times in usage.get("stages", {}).items()
        }
        return sample


class SpeechAsker(Asker):
    """Has texts spoken over HTTP, as `/v1/audio/speech` streams them."""

    def __init__(self, client: aiohttp.ClientSession, model: str, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._client = client
        params = {stage: given for stage, given in self._params.items() if stage == "talker"}
        self._body: dict[str, Any] = {"model": model, "response_format": "pcm", "stage_params": params}
        if options.voice:
            self._body["voice"] = options.voice

    async def __call__(self, index: int) -> Sample:
        began = time.perf_counter()
        sample = Sample()
        body = self._body | {"input": self.prompt(), "seed": index}
        async with self._client.post("/v1/audio/speech", json=body) as response:
            if not response.ok:
                raise RuntimeError(await response.text(errors="replace"))
            async for data in response.content.iter_any():
                sample.playback.add(time.perf_counter() - began, len(data) / SAMPLE_BYTES / SAMPLE_RATE)
        sample.total = time.perf_counter() - began
        return sample
