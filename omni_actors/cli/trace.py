"""Show where a request's time went: `omni-actors trace REQUEST --endpoint ENDPOINT`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from omni_actors import flags
from omni_actors.cli.connection import add_connection, connection, duration, run, size
from omni_actors.client import AsyncOmniClient
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.fields import ATTEMPTS
from omni_actors.protocol.messages import RequestTimeline, StageTimeline
from omni_actors.telemetry.timeline import end_of, extent, phases, replica_name, stages, transfers

LAST = "last"
STYLES = {  # character and colour of each phase
    "waiting": ("·", "#e3e6eb"),
    "gathering": ("-", "#c9d3e4"),
    "queued": ("=", "#f2c14e"),
    "first output": ("▒", "#f08a4b"),
    "output": ("█", "#3d8bd4"),
    "ending": ("|", "#8e9aab"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 done, 1 no such request or no answer, 2 wrong usage)."""
    return run(parser(), arguments, lambda options: asyncio.run(_show(options)))


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    usage = "omni-actors trace [ENDPOINT] REQUEST|last"
    about = (__doc__ or "").partition(":")[0]
    parser = flags.CommandParser(prog="omni-actors trace", usage=usage, description=about)
    parser.add_argument("request", help=f"id of a running request or of one of the last 200, or {LAST!r}")
    add_connection(parser)
    return parser


async def _show(options: argparse.Namespace) -> None:
    async with AsyncOmniClient(**connection(options)) as client:
        found = await client.recent(1) if options.request == LAST else [await client.timeline(options.request)]
    if not found:
        raise InvalidRequest("No request has ended yet.", hint="Send one first.")
    show(found[0], Console())


def show(timeline: RequestTimeline, console: Console) -> None:
    """Print a bar for each stage, then the transfers and the events."""
    started, ended = extent(timeline)
    length = ended - started
    about = f"{timeline.outcome} after {duration(length)}, trace {timeline.trace_id}"
    console.print(Text(f"request {timeline.request_id}: {about}"))
    console.print(Text.assemble(*[(f"{mark} {name}  ", colour) for name, (mark, colour) in STYLES.items()]))
    header = ("stage", "begins", "takes", "tokens")
    rows = [
        (
            _title(stage),
            duration(stage.expected - started),
            duration(end_of(stage) - stage.expected),
            f"{stage.input_tokens}→{stage.output_tokens}",
        )
        for stage in stages(timeline)
    ]
    taken = sum(max(map(len, column)) + 2 for column in zip(header, *rows, strict=True))
    width = max(10, console.width - taken - 2)
    table = Table(box=None, padding=(0, 1))
    for name in (*header, ""):
        table.add_column(name, no_wrap=True)
    for cells, stage in zip(rows, stages(timeline), strict=True):
        table.add_row(*map(Text, cells), _bar(stage, started, width / length if length else 0.0))
    console.print(table)
    for transfer in transfers(timeline):
        counts = f"{transfer.messages} messages, {size(transfer.bytes)}"
        times = f"first one took {duration(transfer.first_latency)}, from {duration(transfer.begin - started)} on"
        console.print(Text(f"  {transfer.source} → {transfer.target}: {counts}, {times}"))
    for event in timeline.events:
        console.print(Text(f"  {duration(event.time - started):>9} {event.name} {event.detail}".rstrip()))


def _title(stage: StageTimeline) -> str:
    attempt = f" #{number}" if (number := stage.attempt % ATTEMPTS) else ""
    return replica_name(stage) + attempt + ("" if stage.outcome == "done" else f" {stage.outcome}")


def _bar(stage: StageTimeline, started: float, scale: float) -> Text:
    """A stage's bar with `scale` characters a second. A phase that is too short for a character is left out."""
    drawn = round((stage.expected - started) * scale)
    bar = Text(" " * drawn)
    for phase in phases(stage):
        end = round((phase.end - started) * scale)
        if end > drawn:
            mark, colour = STYLES[phase.name]
            bar.append(mark * (end - drawn), colour)
            drawn = end
    return bar
