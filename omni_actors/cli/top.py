"""A pipeline at work, in the terminal: `omni-actors top ENDPOINT [--once]`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from omni_actors import envs
from omni_actors.client import AsyncOmniClient
from omni_actors.errors import OmniError
from omni_actors.protocol.client import Operation, Report
from omni_actors.telemetry import metric_table as metrics
from omni_actors.telemetry.drawing import duration, size
from omni_actors.telemetry.metric_table import Metric

EXIT_OK, EXIT_FAILED = 0, 1
STATE_COLOURS = {"ready": "green", "draining": "yellow", "dead": "red", "waiting": "red"}

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True)
class Look:
    """The pipeline at one moment (`time` of the monotonic clock)."""

    time: float
    report: Report
    series: Series

    def value(self, metric: Metric, *labels: str, suffix: str = "") -> float:
        """One series; 0 where there is none."""
        return self.series.get((metric.name + suffix, frozenset(zip(metric.labels, labels, strict=True))), 0.0)

    def labels(self, metric: Metric, suffix: str = "") -> list[tuple[str, ...]]:
        """The label values of all series of a metric, in order."""
        found = [dict(labels) for name, labels in self.series if name == metric.name + suffix]
        return sorted({tuple(labels[label] for label in metric.labels) for labels in found})


@dataclass(frozen=True)
class Rates:
    """Differences of counters between two looks, per second; without a look before, since the beginning all are 0."""

    before: Look | None
    now: Look

    def rate(self, metric: Metric, *labels: str, suffix: str = "") -> float:
        """Growth per second."""
        seconds = self.now.time - self.before.time if self.before is not None else 0.0
        return self._growth(metric, *labels, suffix=suffix) / seconds if seconds > 0 else 0.0

    def mean(self, metric: Metric, *labels: str) -> float | None:
        """Mean of a histogram's observations between the looks; if there were none, of all that there are."""
        for before in (self.before, None):
            earlier = Rates(before, self.now)
            count = earlier._growth(metric, *labels, suffix="_count")
            if count > 0:
                return earlier._growth(metric, *labels, suffix="_sum") / count
        return None

    def _growth(self, metric: Metric, *labels: str, suffix: str) -> float:
        before = self.before.value(metric, *labels, suffix=suffix) if self.before is not None else 0.0
        return max(0.0, self.now.value(metric, *labels, suffix=suffix) - before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 done, 1 nobody answers, 2 wrong usage)."""
    options = _parser().parse_args(arguments)
    try:
        asyncio.run(_run(envs.endpoint(options.endpoint), options))
    except KeyboardInterrupt:
        return EXIT_OK
    except OmniError as error:
        print(f"error ({error.code.value}): {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="omni-actors top", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("endpoint", nargs="?", help="where clients connect (default: OMNI_ACTORS_ENDPOINT)")
    parser.add_argument("--keys", metavar="DIR", default=envs.keys_dir(), help="CURVE keys for a tcp:// endpoint")
    parser.add_argument("--once", action="store_true", help="show it once, with the rates of one interval, and end")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    return parser


async def _run(endpoint: str, options: argparse.Namespace) -> None:
    interval = max(0.1, options.interval)
    console = Console()
    async with AsyncOmniClient(endpoint, keys=options.keys) as client:
        before = await look(client)
        if options.once:
            await asyncio.sleep(interval)
            console.print(render(Rates(before, await look(client))))
            return
        with Live(render(Rates(None, before)), console=console, screen=console.is_terminal) as live:
            while True:
                await asyncio.sleep(interval)
                now = await look(client)
                live.update(render(Rates(before, now)))
                before = now


async def look(client: AsyncOmniClient) -> Look:
    """Ask the coordinator."""
    report = await client.operate(Operation.STATUS)
    text = await client.metrics()
    series = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }
    return Look(time.monotonic(), report, series)


def render(rates: Rates) -> Group:
    """One frame: a line about the whole, a table of replicas, a table of edges."""
    return Group(_head(rates), _replicas(rates), _edges(rates))


def _head(rates: Rates) -> Text:
    now = rates.now
    shown = now.report.description
    outcomes = now.labels(metrics.REQUESTS)
    ended = sum(now.value(metrics.REQUESTS, *labels) for labels in outcomes)
    bad = sum(now.value(metrics.REQUESTS, *labels) for labels in outcomes if labels[0] != "done")
    words = [
        f"{shown.in_flight} of {shown.max_in_flight} requests in flight",
        f"{sum(rates.rate(metrics.REQUESTS, *labels) for labels in outcomes):.1f}/s",
        f"{ended:.0f} ended, {bad:.0f} of them badly",
        f"first text {_time(rates.mean(metrics.FIRST_TEXT))}",
        f"first audio {_time(rates.mean(metrics.FIRST_AUDIO))}",
        f"real-time factor {_number(rates.mean(metrics.REALTIME_FACTOR))}",
    ]
    health = ("healthy", "green") if shown.healthy else ("degraded", "red")
    return Text.assemble((shown.pipeline, "bold"), " ", health, ": ", ", ".join(words))


def _replicas(rates: Rates) -> Table:
    shown = Table(box=None, padding=(0, 1), header_style="bold")
    for name in (
        "replica",
        "state",
        "pid",
        "requests",
        "waiting",
        "tokens/s",
        "audio s/s",
        "step",
        "queue",
        "KV",
        "memory",
        "device",
        "restarts",
    ):
        shown.add_column(name, justify="left" if name in ("replica", "state") else "right", no_wrap=True)
    now = rates.now
    for status in now.report.description.stages:
        labels = (status.stage, str(status.replica))
        shown.add_row(
            Text("/".join(labels)),
            Text(status.state, STATE_COLOURS.get(status.state, "yellow")),
            str(status.pid or "-"),
            str(status.in_flight),
            f"{now.value(metrics.VLLM_WAITING, *labels):.0f}",
            f"{rates.rate(metrics.OUTPUT_TOKENS, *labels):.1f}",
            f"{rates.rate(metrics.STAGE_AUDIO, *labels):.2f}",
            _time(rates.mean(metrics.STEP_SECONDS, *labels)),
            _time(rates.mean(metrics.QUEUE_SECONDS, *labels)),
            f"{now.value(metrics.VLLM_KV, *labels):.0%}",
            size(now.value(metrics.RESIDENT, *labels)),
            size(now.value(metrics.DEVICE_BYTES, *labels)),
            f"{now.value(metrics.RESTARTS, *labels):.0f}",
        )
    return shown


def _edges(rates: Rates) -> Table:
    shown = Table(box=None, padding=(0, 1), header_style="bold")
    for name in ("edge", "messages/s", "bytes/s", "shared/s", "latency", "credit", "waiting"):
        shown.add_column(name, justify="left" if name == "edge" else "right", no_wrap=True)
    for labels in rates.now.labels(metrics.EDGE_MESSAGES):
        shown.add_row(
            Text(" → ".join(labels)),
            f"{rates.rate(metrics.EDGE_MESSAGES, *labels):.1f}",
            size(rates.rate(metrics.EDGE_BYTES, *labels)),
            size(rates.rate(metrics.EDGE_SHARED, *labels)),
            _time(rates.mean(metrics.EDGE_LATENCY, *labels)),
            f"{rates.now.value(metrics.EDGE_CREDIT, *labels):.0f}",
            f"{rates.now.value(metrics.EDGE_WAITING, *labels):.0f}",
        )
    return shown


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
