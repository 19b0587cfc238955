"""Measures the start, the first answer and the memory of a pipeline, and how well the starts of its stages overlap.

    python benchmarks/startup.py stage_configs/tiny_qwen2_5_omni.yaml [--alone]

Prints three tables: milestones in seconds, memory in MiB, seconds per stage. Memory is RSS and PSS (shared pages are
divided among their users: the stages share the fork server's imports). With `--alone` each stage is also started by
itself, and then all together, each time in a new process with a new fork server.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from typing import Any

import command_line
import psutil
import serve
import workload

from omni_actors import config
from omni_actors.client import AsyncOmniClient, Audio, Text

MIB = 1 << 20


async def whole_pipeline(options: argparse.Namespace) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Milestones in seconds, and the memory of each process after the first answers."""
    async with serve.pipeline(options) as (endpoint, ready), AsyncOmniClient(endpoint) as client:
        times = {"ready": ready}
        for attempt in ("first request", "second request"):
            asked = time.perf_counter()
            async for item in await client.submit("What is the capital of France?", seed=1):
                now = time.perf_counter() - asked
                if isinstance(item, Text):
                    times.setdefault(f"{attempt}: first text", now)
                elif isinstance(item, Audio):
                    times.setdefault(f"{attempt}: first audio", now)
            times[f"{attempt}: end"] = time.perf_counter() - asked
        stages = [(f"{stage.stage}/{stage.replica}", stage.pid) for stage in (await client.describe()).stages]
        own = psutil.Process()
        coordinators = [child for child in own.children() if "omni:coordinator" in " ".join(child.cmdline())]
        processes = [("launcher", own.pid), *(("coordinator", child.pid) for child in coordinators), *stages]
        return times, [process_memory(name, pid) for name, pid in processes]


def process_memory(name: str, pid: int) -> dict[str, Any]:
    info = psutil.Process(pid).memory_full_info()
    return {"process": name, "RSS MiB": round(info.rss / MIB), "PSS MiB": round(info.pss / MIB)}


def cold_start(options: argparse.Namespace, stages: list[str]) -> float:
    """Seconds until these stages are ready, in a new process with a new fork server."""
    changes = command_line.set_arguments(command_line.overrides(options))
    command = [sys.executable, __file__, options.config, *changes, "--only", *stages]
    return float(subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=300))


async def main(options: argparse.Namespace) -> None:
    if options.only:
        async with serve.pipeline(options, stages=options.only) as (_, ready):
            print(ready)
        return
    times, memory = await whole_pipeline(options)
    print(f"{table('milestone', times)}\n\n{workload.table(memory)}")
    if options.alone:
        names = [stage.name for stage in config.load(options.config, command_line.overrides(options)).pipeline.stages]
        starts = {f"{name} alone": cold_start(options, [name]) for name in names}
        slowest, together = max(starts.values()), cold_start(options, names)
        starts |= {"all together": together, "together / slowest alone": together / slowest}
        print(f"\n{table('cold start to ready', starts)}")


def table(title: str, seconds: dict[str, float]) -> str:
    return workload.table([{title: name, "seconds": f"{value:.2f}"} for name, value in seconds.items()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    command_line.add_flags(parser)
    parser.add_argument("--alone", action="store_true", help="also start every stage by itself")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="print the seconds until these stages are ready")
    asyncio.run(main(parser.parse_args()))
