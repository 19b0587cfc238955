"""Inspects and operates a running pipeline: `omni-actors ctl [ENDPOINT] status|drain|restart|shutdown`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from omni_actors import flags
from omni_actors.cli.connection import Connection, add_connection, connection, with_flag
from omni_actors.client import AsyncOmniClient
from omni_actors.errors import InvalidRequest, OmniError, RequestTimeout
from omni_actors.processes import EXIT_FAILED, EXIT_OK
from omni_actors.protocol.client import Operation, Report

POLL_SECONDS = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 done, 1 refused or failed, 2 wrong usage)."""
    options = parser().parse_args(with_flag(sys.argv[1:] if arguments is None else arguments))
    try:
        stage, replica = _target(options.replica) if "replica" in options else ("", 0)
        return asyncio.run(_run(connection(options), options, Operation(options.operation), stage, replica))
    except OmniError as error:
        print(f"error ({error.code.value}): {error}", file=sys.stderr)
        return EXIT_FAILED


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    usage = "omni-actors ctl [ENDPOINT] status | drain STAGE/REPLICA | restart STAGE/REPLICA | shutdown"
    parser = flags.CommandParser(prog="omni-actors ctl", usage=usage, description=__doc__)
    add_connection(parser)
    operations = parser.add_subparsers(dest="operation", required=True)
    operations.add_parser("status", help="stages, links and requests in flight")
    for name, text in (
        ("drain", "give a replica no new requests"),
        ("restart", "drain a replica and restart it, without failing a request"),
    ):
        command = operations.add_parser(name, help=text)
        command.add_argument("replica", metavar="STAGE/REPLICA", help="for instance talker/0")
        command.add_argument(
            "--wait", type=flags.seconds_or_none, default=0.0, metavar="SECONDS", help="wait until it is done"
        )
    operations.add_parser("shutdown", help="end the pipeline, as SIGTERM does")
    return parser


def _target(text: str) -> tuple[str, int]:
    stage, separator, number = text.partition("/")
    if not stage or not separator or not number.isdecimal() or int(number) > 65535:
        raise InvalidRequest(f"{text!r} does not name a replica.", hint="Write STAGE/REPLICA, for instance talker/0.")
    return stage, int(number)


async def _run(
    pipeline: Connection, options: argparse.Namespace, operation: Operation, stage: str, replica: int
) -> int:
    async with AsyncOmniClient(pipeline.endpoint, keys=pipeline.keys) as client:
        before = await client.operate(Operation.STATUS)
        report = await client.operate(operation, stage, replica)
        if operation is Operation.STATUS:
            print(render(report))
            return EXIT_OK
        print(report.text)
        if stage and options.wait:
            await _wait(client, operation, before, stage, replica, options.wait)
            print("done")
    return EXIT_OK


async def _wait(
    client: AsyncOmniClient, operation: Operation, before: Report, stage: str, replica: int, seconds: float
) -> None:
    former = _epoch(before, stage, replica)
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        description = await client.describe()
        status = next(item for item in description.stages if (item.stage, item.replica) == (stage, replica))
        if operation is Operation.DRAIN and not status.in_flight:
            return
        if operation is Operation.RESTART and status.epoch != former and status.state == "ready":
            return
        if asyncio.get_running_loop().time() > deadline:
            raise RequestTimeout(f"{stage}/{replica} is {status.state} with {status.in_flight} requests.", hint="")
        await asyncio.sleep(POLL_SECONDS)


def _epoch(report: Report, stage: str, replica: int) -> int:
    return next((e.epoch for e in report.description.stages if (e.stage, e.replica) == (stage, replica)), 0)


def render(report: Report) -> str:
    """Render a report as text: a line per replica, a line per request, and the counts that are not zero."""
    shown = report.description
    health = "healthy" if shown.healthy else "degraded"
    requests = f"{shown.in_flight} of {shown.max_in_flight} requests in flight, {shown.queued} queued"
    if shown.speech_places:
        requests += f", {shown.speech_running} of {shown.speech_places} speaking, {shown.speech_waiting} waiting to"
    lines = [f"{shown.pipeline}: {health}, {requests}"]
    edges = {(edge.stage, edge.replica): edge for edge in report.edges}
    for stage in shown.stages:
        text = f"  {stage.stage}/{stage.replica}: {stage.state}{' (spare)' if stage.spare else ''}"
        text += f", epoch {stage.epoch}, pid {stage.pid}"
        text += f", {stage.in_flight} requests"
        edge = edges.get((stage.stage, stage.replica))
        if edge is not None:
            text += f", {edge.phase}" if edge.phase != stage.state else ""
            text += f", {edge.restarts} restarts, heard {edge.silent:.1f} s ago, turned {edge.idle:.1f} s ago"
            text += f", link: {edge.messages_out} messages and {edge.bytes_out} bytes out, {edge.waiting} waiting"
        lines.append(text)
    for request in report.requests:
        text = f"  request {request.request_id}: {request.state}, attempt {request.attempt}"
        text += f", {' -> '.join(request.route) or 'unbound'}, done: {', '.join(request.stages_done) or 'none'}"
        text += f", {request.remaining:.1f} s left"
        lines.append(f"{text}{''.join(f', lost {loss}' for loss in request.losses)}")
    lines += [f"  {name}: {count}" for name, count in sorted(shown.counts.items()) if count]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
