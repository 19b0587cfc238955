"""Measures what a long conversation costs: the times to first text and first sound, turn by turn.

    python benchmarks/turns.py stage_configs/qwen2_5_omni.yaml --model DIR [--turns 10] [--without-cache]

One person talks: every turn holds all earlier ones, as chats do, and asks for text and speech. With the prefix cache a
turn pays for what is new in it. `--without-cache` keeps no rows (`row_cache_bytes: 0`), so that every turn computes the
whole conversation, as before. `--people N` has N conversations at a time, each different from its first word on.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import command_line
import serve
import workload

from omni_actors.client import AsyncOmniClient, Audio, Text


async def talk(client: AsyncOmniClient, person: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One conversation; a row for each of its turns."""
    messages: list[dict[str, str]] = []
    rows = []
    params = {"thinker": {"max_tokens": options.text_tokens, "min_tokens": options.text_tokens, "temperature": 0.0}}
    params["talker"] = {"max_tokens": options.codec_tokens}
    for turn in range(options.turns):
        question = workload.prompt(1000 * person + turn, options.repeats)
        messages.append({"role": "user", "content": f"Person {person}, turn {turn}: {question}"})
        began = time.perf_counter()
        stream = await client.submit(messages, params=params, seed=turn, timeout=options.timeout)
        first: dict[type, float] = {}
        text = ""
        async for item in stream:
            first.setdefault(type(item), time.perf_counter() - began)
            if isinstance(item, Text):
                text += item.text
        messages.append({"role": "assistant", "content": text})
        row = {"turn": turn + 1, "prompt_tokens": stream.usage["thinker"].input_tokens}
        row["first_text_ms"] = round(1000 * first[Text], 1)
        rows.append(row | {"first_sound_ms": round(1000 * first.get(Audio, float("nan")), 1)})
    return rows


async def measure(endpoint: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The conversations at a time; medians by turn."""
    async with AsyncOmniClient(endpoint) as client:
        await talk(client, options.people, argparse.Namespace(**{**vars(options), "turns": 2}))  # warms up
        spoken = await asyncio.gather(*(talk(client, person, options) for person in range(options.people)))
    turns = zip(*spoken, strict=True)
    return [{name: statistics.median(row[name] for row in rows) for name in rows[0]} for rows in turns]


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a pipeline, which is started unless it runs already."""
    if options.endpoint:
        return await measure(options.endpoint, options)
    if options.without_cache:
        options.set.append("stages.thinker.row_cache_bytes=0")
    async with serve.pipeline(options) as (endpoint, _):
        return await measure(endpoint, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?")
    parser.add_argument("--endpoint", help="of a pipeline that runs, in place of a configuration")
    command_line.add_flags(parser)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--people", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10, help="length of each question, in sentences")
    parser.add_argument("--text-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--codec-tokens", type=int, default=60)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--without-cache", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not (options.config or options.endpoint):
        parser.error("give a configuration or --endpoint")
    rows = asyncio.run(run(options))
    if options.json:
        options.json.write_text(workload.report(rows) + "\n")
    print(workload.table(rows))
