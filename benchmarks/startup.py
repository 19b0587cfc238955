"""Measures the start, the first answer and the memory of a pipeline, and how well the starts of its stages overlap.

    python benchmarks/startup.py stage_configs/tiny_qwen2_5_omni.yaml [--alone]

Prints three tables: milestones in seconds, memory in MiB, seconds per stage. Memory is RSS and PSS (shared pages are
divided among their users: the stages share the fork server's imports). With `--alone` each stage is also started by
itself, and then all together, each time in a new process with a new fork server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import command_line
import psutil

import omni_actors
from omni_actors import config
from omni_actors.client import AsyncOmniClient, Audio, Text
from omni_actors.coordinator.process_spec import CoordinatorSpec
from omni_actors.coordinator.shell import Coordinator
from omni_actors.host.run_directory import RunDirectory
from omni_actors.launch import Launcher
from omni_actors.launcher.replica_processes import ReplicaProcesses
from omni_actors.protocol.fields import PROTOCOL_VERSION, ReplicaId
from omni_actors.protocol.messages import NodeHello

MIB = 1 << 20


async def whole_pipeline(pipeline: config.PipelineConfig) -> tuple[dict[str, float], list[tuple[str, float, float]]]:
    """Milestones in seconds, and (process, RSS MiB, PSS MiB) after the first answer."""
    began = time.perf_counter()
    times: dict[str, float] = {}
    launcher = Launcher(pipeline)
    try:
        await launcher.start()
        times["ready"] = time.perf_counter() - began
        async with AsyncOmniClient(launcher.endpoint) as client:
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
    finally:
        await launcher.close()


def process_memory(name: str, pid: int) -> tuple[str, float, float]:
    info = psutil.Process(pid).memory_full_info()
    return name, info.rss / MIB, info.pss / MIB


async def start_stages(pipeline: config.PipelineConfig, stages: list[str]) -> float:
    """Seconds from the spawn of these stages until all are ready."""
    run_directory = RunDirectory()
    endpoints = [run_directory.endpoint(name) for name in ("client", "control", "results")]
    run_dir, now = str(run_directory.path), time.monotonic()
    coordinator = Coordinator(CoordinatorSpec(pipeline, *endpoints, os.getpid(), run_dir, True, now, now))
    node = ReplicaProcesses(pipeline, run_directory, coordinator.control_endpoint)
    try:
        running = tuple(ReplicaId(stage, 0, 1) for stage in stages)
        hello = NodeHello(PROTOCOL_VERSION, omni_actors.__version__, pipeline.digest(), running)
        coordinator.from_node(0, hello)
        began = time.perf_counter()
        for stage in stages:
            await node.start(ReplicaId(stage, 0, 1))
        while not all(replica.ready for stage in stages for replica in coordinator.fleet.replicas.of(stage)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return time.perf_counter() - began
    finally:
        coordinator.stop()
        closing = asyncio.create_task(coordinator.run())
        await node.stop(10)
        await closing
        run_directory.close()


def cold_start(options: argparse.Namespace, stages: list[str]) -> float:
    """`start_stages` in a new process, with a new fork server."""
    changes = command_line.set_arguments(command_line.overrides(options))
    command = [sys.executable, __file__, options.config, *changes, "--only", *stages]
    output = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=300)
    return float(output)


async def main(options: argparse.Namespace) -> None:
    pipeline = config.load(Path(options.config), command_line.overrides(options)).pipeline
    if options.only:
        print(await start_stages(pipeline, options.only))
        return
    times, memory = await whole_pipeline(pipeline)
    print("| milestone | seconds |\n|---|---|")
    for name, seconds in times.items():
        print(f"| {name} | {seconds:.2f} |")
    print("\n| process | RSS MiB | PSS MiB |\n|---|---|---|")
    for name, rss, pss in memory:
        print(f"| {name} | {rss:.0f} | {pss:.0f} |")
    if options.alone:
        print_overlap(options, [stage.name for stage in pipeline.stages])


def print_overlap(options: argparse.Namespace, names: list[str]) -> None:
    alone = {name: cold_start(options, [name]) for name in names}
    together = cold_start(options, names)
    print("\n| cold start to ready | seconds |\n|---|---|")
    for name, seconds in alone.items():
        print(f"| {name} alone | {seconds:.2f} |")
    print(f"| all together | {together:.2f} |\n| together / slowest alone | {together / max(alone.values()):.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    command_line.add_flags(parser)
    parser.add_argument("--alone", action="store_true", help="also start every stage by itself")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="print the seconds until these stages are ready")
    asyncio.run(main(parser.parse_args()))
