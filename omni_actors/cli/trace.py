"""Where a request's time went: `omni-actors trace REQUEST --endpoint ENDPOINT [--svg FILE] [--html FILE]`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from omni_actors import envs
from omni_actors.client import AsyncOmniClient
from omni_actors.errors import ConfigError, InvalidRequest, OmniError
from omni_actors.protocol.telemetry import RequestTimeline
from omni_actors.telemetry.chart import Chart, StageBar, chart
from omni_actors.telemetry.drawing import COLOURS, duration, page, size, svg

EXIT_OK, EXIT_FAILED = 0, 1
LAST = "last"
MARKS = {"waiting": "·", "gathering": "-", "queued": "=", "first output": "▒", "output": "█", "ending": "|"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 done, 1 no such request or nobody answers, 2 wrong usage)."""
    options = _parser().parse_args(arguments)
    try:
        drawn = chart(asyncio.run(_ask(envs.endpoint(options.endpoint), options.keys, options.request)))
        for path, text in ((options.svg, svg), (options.html, page)):
            if path is not None:
                _write(path, text(drawn))
    except OmniError as error:
        print(f"error ({error.code.value}): {error}", file=sys.stderr)
        return EXIT_FAILED
    if options.svg is None and options.html is None:
        show(drawn, Console())
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="omni-actors trace", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("request", help=f"id of a request that runs or of one of the last 200, or {LAST!r}")
    parser.add_argument("--endpoint", help="where clients connect (default: OMNI_ACTORS_ENDPOINT)")
    parser.add_argument("--keys", metavar="DIR", default=envs.keys_dir(), help="CURVE keys for a tcp:// endpoint")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture instead")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the picture instead")
    return parser


async def _ask(endpoint: str, keys: str | None, request_id: str) -> RequestTimeline:
    async with AsyncOmniClient(endpoint, keys=keys) as client:
        if request_id != LAST:
            return await client.timeline(request_id)
        recent = await client.recent(1)
        if not recent:
            raise InvalidRequest("No request has ended yet.", hint="Send one first.")
        return recent[0]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror}.") from error


def show(drawn: Chart, console: Console) -> None:
    """Bars in the terminal, one line per stage, then the hops and what happened."""
    console.print(Text(f"request {drawn.id}: {drawn.outcome} after {duration(drawn.seconds)}, trace {drawn.trace_id}"))
    console.print(Text.assemble(*_legend()))
    rows = [
        (_name(stage), duration(stage.at), duration(stage.seconds), f"{stage.input_tokens}→{stage.output_tokens}")
        for stage in drawn.stages
    ]
    names = ("stage", "begins", "takes", "tokens")
    taken = sum(max(len(row[index]) for row in (*rows, names)) + 2 for index in range(len(names)))
    table = Table(box=None, padding=(0, 1))
    for name in (*names, ""):
        table.add_column(name, no_wrap=True)
    for cells, stage in zip(rows, drawn.stages, strict=True):
        table.add_row(*map(Text, cells), _bar(stage, drawn.seconds, max(10, console.width - taken - 2)))
    console.print(table)
    for hop in drawn.hops:
        words = f"{hop.messages} messages, {size(hop.bytes)}, first one took {duration(hop.first_latency)}"
        console.print(Text(f"  {hop.source} → {hop.target}: {words}, from {duration(hop.at)} on"))
    for event in drawn.events:
        console.print(Text(f"  {duration(event.at):>9} {event.name} {event.detail}".rstrip()))


def _name(stage: StageBar) -> str:
    attempt = f" #{stage.attempt}" if stage.attempt else ""
    return f"{stage.stage}/{stage.replica}{attempt}" + ("" if stage.outcome == "done" else f" {stage.outcome}")


def _legend() -> list[tuple[str, str]]:
    return [(f"{MARKS[name]} {name}  ", colour) for name, colour in COLOURS.items()]


def _bar(stage: StageBar, seconds: float, width: int) -> Text:
    """A stage's line; a phase that is too short for a character is left out."""
    bar = Text()
    scale = width / seconds if seconds else 0.0
    drawn = round(stage.at * scale)
    bar.append(" " * drawn)
    for phase in stage.phases:
        end = round((phase.at + phase.seconds) * scale)
        if end > drawn:
            bar.append(MARKS[phase.name] * (end - drawn), COLOURS[phase.name])
            drawn = end
    return bar


if __name__ == "__main__":
    sys.exit(main())
