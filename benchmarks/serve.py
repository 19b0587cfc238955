"""Measures latency and throughput of a pipeline by load: of a running one, or of one that it starts.

    python benchmarks/serve.py stage_configs/qwen2_5_omni.yaml --model DIR --concurrency 1 8 32
    python benchmarks/serve.py --endpoint ipc:///tmp/omni-x/client --rate 2 4 --requests 200
    python benchmarks/serve.py --endpoint ipc:///tmp/omni-x/client --http http://127.0.0.1:8000

With `--http` every load is measured twice, through our client and over HTTP; with `--only-http`, too, only over HTTP.
With `--speech` requests go over HTTP to /v1/audio/speech, of a pipeline that speaks the text that it is given, too.
With `--word-seconds` such a pipeline speaks texts while they are written, and times count from the third word.

All requests have the same lengths (`--text-tokens`, `--codec-tokens`, no earlier end). workload.py defines the columns
and their units. A warm-up round precedes each load. `--json FILE` writes the results with versions and flags.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import command_line
import msgspec
import workload
from askers import Asker, ClientAsker, HttpAsker, SpeechAsker, WordsAsker, http_client
from workload import Sample

from omni_actors import config
from omni_actors.cli import top
from omni_actors.client import AsyncOmniClient
from omni_actors.launch import Launcher
from omni_actors.telemetry import metrics as table

SNAPSHOT_SECONDS = 1.0  # two heartbeats, until the stages have reported all counts of a load


def stage_times(samples: Sequence[Sample]) -> str:
    """Medians of every stage's first output and end, in ms since the stage received the request."""
    parts = []
    for stage in samples[0].stages:
        first, end = (statistics.median(1000 * s.stages[stage][index] for s in samples) for index in (0, 1))
        parts.append(f"{stage} {first:.0f} to {end:.0f}")
    return "  stages, ms: " + ", ".join(parts)


def busy(rates: top.Rates) -> str:
    """Steps of every replica during a load, and shares of the time: in steps, held back, on a processor."""
    parts = []
    for stage, replica in rates.now.labels(table.READY):
        name = (stage, replica)
        count, seconds = (rates.rate(table.STEP_SECONDS, *name, suffix=suffix) for suffix in ("_count", "_sum"))
        shares = f"{seconds:.0%} in steps, {rates.rate(table.HELD_BACK, *name):.0%} no credit"
        parts.append(
            f"  {stage}/{replica}: {count:.0f} steps a second of {1000 * seconds / count if count else 0:.2f} ms, "
            f"{shares}, processor {rates.rate(table.CPU_SECONDS, *name):.0%}"
        )
    return "\n".join(parts)


async def measure(
    endpoint: str, options: argparse.Namespace, url: str = "", *, only_http: bool = False
) -> list[dict[str, Any]]:
    """All loads against a running pipeline; over HTTP, too (or only), if its server has a `url`."""
    rows = []

    async def keep(load: str, run: Awaitable[tuple[list[Sample], float]]) -> None:
        await asyncio.sleep(SNAPSHOT_SECONDS)
        before = await top.scrape(client)
        samples, wall = await run
        rows.append(workload.summary(load, samples, wall))
        print(json.dumps(rows[-1]), flush=True)
        await asyncio.sleep(SNAPSHOT_SECONDS)
        now = replace(await top.scrape(client), time=before.time + wall)
        print(f"{stage_times(samples)}\n{busy(top.Rates(before, now))}", file=sys.stderr, flush=True)

    async with AsyncOmniClient(endpoint) as client, http_client(url, options.timeout) as http:
        description = await client.describe()
        stages = ", ".join(f"{stage.stage}/{stage.replica}" for stage in description.stages)
        print(f"{description.pipeline} ({description.model}): {stages}", file=sys.stderr)
        way_in = WordsAsker if options.word_seconds else ClientAsker
        askers: dict[str, Asker] = {} if only_http else {"": way_in(client, options)}
        if url:
            asker = SpeechAsker if options.speech else HttpAsker
            askers[" over HTTP"] = asker(http, description.pipeline, options)
        for concurrency in options.concurrency:
            for way, ask in askers.items():
                await workload.closed_loop(ask, concurrency, concurrency)  # before the counters are read
                count = max(options.rounds * concurrency, 3)
                await keep(f"c={concurrency}{way}", workload.closed_loop(ask, concurrency, count))
        for rate in options.rate:
            for way, ask in askers.items():
                await workload.closed_loop(ask, 4, 8)
                await keep(f"{rate:g}/s{way}", workload.poisson(ask, rate, options.requests))
    return rows


@contextlib.asynccontextmanager
async def pipeline(options: argparse.Namespace, *, stages: Sequence[str] = ()):
    """Start the pipeline of `options` (only `stages`, if given); yield its endpoint and the seconds to ready."""
    loaded = config.load(Path(options.config), command_line.overrides(options)).pipeline
    if stages:
        kept = [stage for stage in loaded.stages if stage.name in stages]
        first = msgspec.structs.replace(kept[0], inputs=None)  # of which the one that it reads from may be left out
        loaded = msgspec.structs.replace(loaded, stages=[first, *kept[1:]])
    launcher = Launcher(loaded)
    try:
        began = time.perf_counter()
        await launcher.start()
        ready = time.perf_counter() - began
        print(f"ready after {ready:.1f} s", file=sys.stderr)
        yield launcher.endpoint, ready
    finally:
        await launcher.close()


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe the load."""
    command_line.add_flags(parser)
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3, help="requests per concurrency = rounds * concurrency")
    parser.add_argument("--rate", type=float, nargs="*", default=[], help="Poisson arrivals a second")
    parser.add_argument("--requests", type=int, default=100, help="requests per rate")
    parser.add_argument("--prompt-repeats", type=int, default=1, help="longer prompts (see prompt_tokens in the table)")
    parser.add_argument("--text-tokens", type=int, default=64)
    parser.add_argument("--codec-tokens", type=int, default=512, help="0 for text only")
    parser.add_argument("--word-seconds", type=float, default=0.0, help="from word to word; 0: the text is there")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")


async def main(options: argparse.Namespace) -> None:
    facts: dict[str, Any] = {}
    with workload.DeviceMemory() as memory:
        if options.endpoint:
            rows = await measure(options.endpoint, options, options.http, only_http=options.only_http or options.speech)
        else:
            async with pipeline(options) as (endpoint, ready):
                facts["ready_s"] = round(ready, 1)
                rows = await measure(endpoint, options)
    facts["peak_device_memory_gib"] = [round(gib, 1) for gib in memory.peak_gib]
    print(workload.table(rows))
    print(f"peak memory: {memory}; {workload.versions_line()}")
    if options.json:
        options.json.write_text(workload.report(rows, **facts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="start this pipeline for the measurement")
    parser.add_argument("--endpoint", help="measure a running pipeline instead")
    parser.add_argument("--http", default="", metavar="URL", help="measure the running pipeline's HTTP server, too")
    parser.add_argument("--only-http", action="store_true", help="leave out the measurement through our client")
    parser.add_argument("--speech", action="store_true", help="have texts spoken by /v1/audio/speech; needs --http")
    parser.add_argument("--voice", help="of --speech; by default the model's own")
    add_load_arguments(parser)
    arguments = parser.parse_args()
    if not (arguments.config or arguments.endpoint):
        parser.error("give a pipeline's YAML or --endpoint")
    if arguments.http and not arguments.endpoint:
        parser.error("--http needs --endpoint: start the pipeline with --http HOST:PORT first")
    if arguments.speech and not arguments.http:
        parser.error("--speech needs --http")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(arguments))
