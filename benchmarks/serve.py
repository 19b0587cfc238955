"""Load a running pipeline (or start one) and print latency and throughput by concurrency.

    python benchmarks/serve.py stage_configs/qwen2_5_omni.yaml --model DIR --concurrency 1 8 32
    python benchmarks/serve.py --endpoint ipc:///tmp/omni-x/client

TTFT: submit -> first text token at the client. TTFA: submit -> first samples at the client. RTF: wall / audio
seconds. Every request has the same lengths (`--text-tokens`, `--codec-tokens`, no earlier end); figures are medians
after one warm-up round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from omni_actors.client import AsyncOmniClient, Audio, Text
from omni_actors.messages import Description

PROMPT = "Tell me about the sea, its tides and the ships that cross it. " * 16


@dataclass
class Sample:
    first_text: float = 0.0
    first_audio: float = 0.0
    total: float = 0.0
    text_tokens: int = 0
    audio_seconds: float = 0.0
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)  # first output, finished


async def ask(client: AsyncOmniClient, index: int, options: argparse.Namespace) -> Sample:
    modalities = ["text", "audio"] if options.codec_tokens else ["text"]
    # min_tokens keeps the end tokens from being sampled; ignoring them would hand them to the vocoder.
    params = {"thinker": {"max_tokens": options.text_tokens, "min_tokens": options.text_tokens, "temperature": 0.0}}
    if options.codec_tokens:
        params["talker"] = {"max_tokens": options.codec_tokens, "min_tokens": options.codec_tokens}
    began = time.perf_counter()
    sample = Sample()
    stream = await client.submit(
        f"{index} {PROMPT}", modalities=modalities, params=params, seed=index, timeout=options.timeout
    )
    async for item in stream:
        now = time.perf_counter() - began
        if isinstance(item, Text):
            sample.first_text = sample.first_text or now
            sample.text_tokens += len(item.token_ids)
        elif isinstance(item, Audio):
            sample.first_audio = sample.first_audio or now
            sample.audio_seconds += len(item.samples) / item.sample_rate
    sample.total = time.perf_counter() - began
    sample.stages = {stage: (usage.first_output, usage.finished) for stage, usage in stream.usage.items()}
    return sample


async def run_round(client: AsyncOmniClient, concurrency: int, count: int, options: argparse.Namespace):
    """`count` requests, `concurrency` at a time; samples and wall seconds."""
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int) -> Sample:
        async with gate:
            return await ask(client, index, options)

    began = time.perf_counter()
    samples = await asyncio.gather(*(one(index) for index in range(count)))
    return samples, time.perf_counter() - began


def row(concurrency: int, samples: list[Sample], wall: float) -> dict[str, float]:
    audio = sum(sample.audio_seconds for sample in samples)
    return {
        "concurrency": concurrency,
        "requests": len(samples),
        "ttft_ms": round(1000 * statistics.median(s.first_text for s in samples), 1),
        "ttfa_ms": round(1000 * statistics.median(s.first_audio for s in samples), 1),
        "e2e_s": round(statistics.median(s.total for s in samples), 3),
        "req_per_s": round(len(samples) / wall, 3),
        "text_tok_per_s": round(sum(s.text_tokens for s in samples) / wall, 1),
        "rtf": round(wall / audio, 4) if audio else 0.0,
    }


def stage_times(samples: list[Sample]) -> str:
    """Medians of every stage's first output and end, in ms since the stage was told of the request."""
    parts = []
    for stage in samples[0].stages:
        first, end = (statistics.median(1000 * s.stages[stage][index] for s in samples) for index in (0, 1))
        parts.append(f"{stage} {first:.0f} to {end:.0f}")
    return "  stages, ms: " + ", ".join(parts)


async def measure(endpoint: str, options: argparse.Namespace) -> list[dict[str, float]]:
    rows = []
    async with AsyncOmniClient(endpoint) as client:
        print(describe(await client.describe()), file=sys.stderr)
        for concurrency in options.concurrency:
            await run_round(client, concurrency, concurrency, options)  # warm-up
            samples, wall = await run_round(client, concurrency, max(options.rounds * concurrency, 3), options)
            rows.append(row(concurrency, samples, wall))
            print(json.dumps(rows[-1]), flush=True)
            print(stage_times(samples), file=sys.stderr, flush=True)
    return rows


def describe(description: Description) -> str:
    stages = ", ".join(f"{stage.stage}/{stage.replica}" for stage in description.stages)
    return f"{description.pipeline} ({description.model}): {stages}"


def table(rows: list[dict[str, float]]) -> str:
    header = "| " + " | ".join(rows[0]) + " |"
    rule = "|" + "---|" * len(rows[0])
    lines = ["| " + " | ".join(str(value) for value in line.values()) + " |" for line in rows]
    return "\n".join([header, rule, *lines])


async def main(options: argparse.Namespace) -> None:
    if options.endpoint:
        rows = await measure(options.endpoint, options)
    else:
        from omni_actors import config
        from omni_actors.launch import Launcher

        overrides = dict(item.split("=", 1) for item in options.set)
        if options.model:
            overrides["model"] = options.model
        launcher = Launcher(config.load(Path(options.config), overrides).pipeline)
        try:
            began = time.perf_counter()
            await launcher.start()
            print(f"ready after {time.perf_counter() - began:.1f} s", file=sys.stderr)
            rows = await measure(launcher.endpoint, options)
        finally:
            await launcher.close()
    print(table(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="start this pipeline for the measurement")
    parser.add_argument("--endpoint", help="measure a running pipeline instead")
    parser.add_argument("--model")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3, help="requests per concurrency = rounds * concurrency")
    parser.add_argument("--text-tokens", type=int, default=64)
    parser.add_argument("--codec-tokens", type=int, default=512, help="0 for text only")
    parser.add_argument("--timeout", type=float, default=300.0)
    arguments = parser.parse_args()
    if not (arguments.config or arguments.endpoint):
        parser.error("give a pipeline's YAML or --endpoint")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(arguments))
