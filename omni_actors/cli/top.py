"""Watch a running pipeline in the terminal: `omni-actors top [ENDPOINT] [--once]`."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from omni_actors import flags
from omni_actors.cli.connection import add_connection, connection, duration, run, size, state
from omni_actors.client import AsyncOmniClient
from omni_actors.host.processes import EXIT_OK
from omni_actors.protocol.messages import Operation, Report
from omni_actors.telemetry import metrics
from omni_actors.telemetry.metrics import Metric

STATE_COLOURS = {"ready": "green", "draining": "yellow", "dead": "red", "waiting": "red"}
LEFT_ALIGNED = ("replica", "state", "edge")
FIRST_LEFT_OUT = ("pid", "memory", "queue", "restarts", "device", "step", "waiting", "shared/s", "credit", "messages/s")
PADDING = 2  # characters of a column besides its text
Row = Mapping[str, str | Text]

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True)
class Scrape:
    """State and metrics of a pipeline at one moment (`time` of the monotonic clock)."""

    time: float
    report: Report
    series: Series

    def value(self, metric: Metric, *labels: str, suffix: str = "") -> float:
        """The value of one series; 0 if there is none."""
        return self.series.get((metric.name + suffix, frozenset(zip(metric.labels, labels, strict=True))), 0.0)

    def labels(self, metric: Metric) -> list[tuple[str, ...]]:
        """The label values of all series of a metric, sorted."""
        found = [dict(labels) for name, labels in self.series if name == metric.name]
        return sorted({tuple(labels[label] for label in metric.labels) for labels in found})


@dataclass(frozen=True)
class Rates:
    """Changes of counters between two scrapes. Without an earlier one, all rates are 0."""

    before: Scrape | None
    now: Scrape

    def rate(self, metric: Metric, *labels: str, suffix: str = "") -> float:
        """Growth per second."""
        seconds = self.now.time - self.before.time if self.before is not None else 0.0
        return self.growth(metric, *labels, suffix=suffix) / seconds if seconds > 0 else 0.0

    def mean(self, metric: Metric, *labels: str) -> float | None:
        """Mean of a histogram's observations between the scrapes; of all observations if there were none."""
        for before in (self.before, None):
            rates = Rates(before, self.now)
            count = rates.growth(metric, *labels, suffix="_count")
            if count > 0:
                return rates.growth(metric, *labels, suffix="_sum") / count
        return None

    def growth(self, metric: Metric, *labels: str, suffix: str = "") -> float:
        """Increase of a counter since the earlier scrape, or since its beginning."""
        before = self.before.value(metric, *labels, suffix=suffix) if self.before is not None else 0.0
        return max(0.0, self.now.value(metric, *labels, suffix=suffix) - before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 done, 1 no answer, 2 wrong usage)."""
    try:
        return run(parser(), arguments, lambda options: asyncio.run(_run(options)))
    except KeyboardInterrupt:
        return EXIT_OK


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    usage = "omni-actors top [ENDPOINT] [--once] [--interval SECONDS]"
    about = (__doc__ or "").partition(":")[0]
    parser = flags.CommandParser(prog="omni-actors top", usage=usage, description=about)
    add_connection(parser)
    parser.add_argument("--once", action="store_true", help="print one frame, with the rates of one interval, and exit")
    parser.add_argument(
        "--interval", type=flags.seconds, default=1.0, metavar="SECONDS", help="between two frames (default: 1)"
    )
    return parser


async def _run(options: argparse.Namespace) -> None:
    interval = max(0.1, options.interval)
    console = Console()
    async with AsyncOmniClient(**connection(options)) as client:
        before = await scrape(client)
        if options.once:
            await asyncio.sleep(interval)
            console.print(render(Rates(before, await scrape(client)), console.width))
            return
        with Live(render(Rates(None, before), console.width), console=console, screen=console.is_terminal) as live:
            while True:
                await asyncio.sleep(interval)
                now = await scrape(client)
                live.update(render(Rates(before, now), console.width))
                before = now


async def scrape(client: AsyncOmniClient) -> Scrape:
    """Ask the coordinator for its state and metrics."""
    report = await client.operate(Operation.STATUS)
    text = await client.metrics()
    series = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }
    return Scrape(time.monotonic(), report, series)


def render(rates: Rates, width: int) -> Group:
    """One frame of `width` characters: a line about the pipeline, a table of replicas, a table of edges."""
    return Group(_summary(rates), *(_table(rows, width) for rows in (_replicas(rates), _edges(rates))))


def _summary(rates: Rates) -> Text:
    now = rates.now
    description = now.report.description
    outcomes = now.labels(metrics.REQUESTS)
    ended = sum(now.value(metrics.REQUESTS, *labels) for labels in outcomes)
    bad = sum(now.value(metrics.REQUESTS, *labels) for labels in outcomes if labels[0] != "done")
    factor = rates.mean(metrics.REALTIME_FACTOR)
    words = [
        f"{description.in_flight} of {description.max_in_flight} requests in flight",
        f"{sum(rates.rate(metrics.REQUESTS, *labels) for labels in outcomes):.1f}/s",
        f"{ended:.0f} ended, {bad:.0f} of them failed or refused",
        f"first text {_time(rates.mean(metrics.FIRST_TEXT))}",
        f"first audio {_time(rates.mean(metrics.FIRST_AUDIO))}",
        f"smooth after {_time(rates.mean(metrics.SMOOTH_START))}",
        f"real-time factor {'-' if factor is None else f'{factor:.2f}'}",
    ]
    if sessions := now.value(metrics.REALTIME_SESSIONS):
        words += [f"{sessions:.0f} realtime sessions", f"turns found {_time(rates.mean(metrics.REALTIME_LAG))} late"]
    health = ("healthy", "green") if description.healthy else ("degraded", "red")
    return Text.assemble((description.pipeline, "bold"), " ", health, ": ", ", ".join(words))


def _replicas(rates: Rates) -> list[Row]:
    now = rates.now
    rows: list[Row] = []
    for status in now.report.description.stages:
        labels = (status.stage, str(status.replica))
        rows.append(
            {
                "replica": "/".join(labels),
                "state": Text(state(status), STATE_COLOURS.get(status.state, "yellow")),
                "pid": str(status.pid or "-"),
                "requests": str(status.in_flight),
                "waiting": f"{now.value(metrics.VLLM_WAITING, *labels):.0f}",
                "tokens/s": f"{rates.rate(metrics.OUTPUT_TOKENS, *labels):.1f}",
                "audio s/s": f"{rates.rate(metrics.STAGE_AUDIO, *labels):.2f}",
                "step": _time(rates.mean(metrics.STEP_SECONDS, *labels)),
                "queue": _time(rates.mean(metrics.QUEUE_SECONDS, *labels)),
                "KV": f"{now.value(metrics.VLLM_KV, *labels):.0%}",
                "memory": size(now.value(metrics.RESIDENT, *labels)),
                "device": size(now.value(metrics.DEVICE_BYTES, *labels)),
                "restarts": f"{now.value(metrics.RESTARTS, *labels):.0f}",
            }
        )
    return rows


def _edges(rates: Rates) -> list[Row]:
    return [
        {
            "edge": " → ".join(labels),
            "messages/s": f"{rates.rate(metrics.EDGE_MESSAGES, *labels):.1f}",
            "bytes/s": size(rates.rate(metrics.EDGE_BYTES, *labels)),
            "shared/s": size(rates.rate(metrics.EDGE_SHARED, *labels)),
            "latency": _time(rates.mean(metrics.EDGE_LATENCY, *labels)),
            "credit": f"{rates.now.value(metrics.EDGE_CREDIT, *labels):.0f}",
            "waiting": f"{rates.now.value(metrics.EDGE_WAITING, *labels):.0f}",
        }
        for labels in rates.now.labels(metrics.EDGE_MESSAGES)
    ]


def _table(rows: Sequence[Row], width: int) -> Table:
    """A table of rows with the same keys, which are the header; columns that do not fit are left out."""
    shown = Table(box=None, padding=(0, 1), header_style="bold")
    names = fitting(rows, width)
    for name in names:
        shown.add_column(name, justify="left" if name in LEFT_ALIGNED else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(cell if isinstance(cell := row[name], Text) else Text(cell) for name in names))
    return shown


def fitting(rows: Sequence[Row], width: int) -> list[str]:
    """The columns to show in `width` characters: the least important ones are left out until the others fit."""
    names = list(rows[0]) if rows else []
    needed = {name: max(len(name), *(len(row[name]) for row in rows)) + PADDING for name in names}
    for name in FIRST_LEFT_OUT:
        if sum(needed[name] for name in names) <= width:
            break
        if name in names:
            names.remove(name)
    return names


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)
