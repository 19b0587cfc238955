"""Inspects and operates a running pipeline: `omni-actors ctl [ENDPOINT] status|drain|restart|scale|lora|shutdown`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from omni_actors import flags
from omni_actors.cli.autoscale import Pace, autoscale, parse_bounds
from omni_actors.cli.connection import add_connection, connection, run, state
from omni_actors.client import AsyncOmniClient
from omni_actors.errors import InvalidRequest, RequestTimeout, StageUnavailable, counted
from omni_actors.protocol.messages import Operate, Operation, Report, StageStatus

POLL_SECONDS = 0.1
LARGEST = 65535  # number of a replica, of replicas or of a node that the protocol has room for


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 done, 1 refused or failed, 2 wrong usage)."""
    return run(parser(), arguments, lambda options: asyncio.run(_work(options)))


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    usage = "omni-actors ctl [ENDPOINT] status | drain STAGE/REPLICA | restart STAGE/REPLICA | scale STAGE N"
    usage += " | scale --auto STAGE=LEAST:MOST:REQUESTS ... | shutdown"
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
        _add_wait(command)
    scale = operations.add_parser("scale", help="give a stage N replicas, without failing a request")
    scale.add_argument("stage", nargs="?", metavar="STAGE", help="for instance talker")
    scale.add_argument(
        "count", nargs="?", type=_count, metavar="N", help="its replicas from now on, without its spares"
    )
    scale.add_argument(
        "--auto",
        nargs="+",
        type=parse_bounds,
        metavar="STAGE=LEAST:MOST:REQUESTS",
        help="until Ctrl-C, keep enough replicas for REQUESTS on each",
    )
    scale.add_argument("--up", type=flags.seconds_or_none, default=3.0, metavar="SECONDS", help="of load before more")
    scale.add_argument("--down", type=flags.seconds, default=60.0, metavar="SECONDS", help="of calm before less")
    scale.add_argument("--node", type=_count, metavar="RANK", help="add them on this node, or remove them from it")
    _add_wait(scale)
    operations.add_parser("shutdown", help="end the pipeline, as SIGTERM does")
    return parser


def _add_wait(command: argparse.ArgumentParser) -> None:
    text = "wait until it is done"
    command.add_argument("--wait", type=flags.seconds_or_none, default=0.0, metavar="SECONDS", help=text)


def _count(text: str) -> int:
    return flags.whole(text, LARGEST)


def _target(text: str) -> tuple[str, int]:
    stage, separator, number = text.partition("/")
    if not stage or not separator or not number.isdecimal() or int(number) > LARGEST:
        raise InvalidRequest(f"{text!r} does not name a replica.", hint="Write STAGE/REPLICA, for instance talker/0.")
    return stage, int(number)


async def _work(options: argparse.Namespace) -> None:
    if options.operation == Operation.SCALE and options.auto:
        if options.stage or options.node is not None:
            raise InvalidRequest("--auto takes neither STAGE and N nor --node.")
        async with AsyncOmniClient(**connection(options)) as client:
            await autoscale(client, options.auto, Pace(options.up, options.down))
    order = _order(options)
    async with AsyncOmniClient(**connection(options)) as client:
        before = await client.operate(Operation.STATUS)
        report = await client.operate(order.operation, order.stage, order.replica, count=order.count, node=order.node)
        if order.operation is Operation.STATUS:
            print(render(report))
            return
        print(report.text)
        if order.stage and options.wait:
            known = {(item.stage, item.replica): item.epoch for item in before.description.stages}
            await _wait(client, order, known.get((order.stage, order.replica), 0), options.wait)
            print("done")


def _order(options: argparse.Namespace) -> Operate:
    """The command as the coordinator takes it."""
    operation = Operation(options.operation)
    if operation is Operation.SCALE:
        if not options.stage or options.count is None:
            raise InvalidRequest("Stage or number is missing.", hint="Write scale STAGE N, for instance talker 3.")
        return Operate(operation, options.stage, count=options.count, node=options.node)
    stage, replica = _target(options.replica) if "replica" in options else ("", 0)
    return Operate(operation, stage, replica)


async def _wait(client: AsyncOmniClient, order: Operate, former: int, seconds: float) -> None:
    """Wait until an order is carried out. `former`: the epoch that the replica had before.

    Raises:
        StageUnavailable: a replica that was added is given up.
        RequestTimeout: it takes more than `seconds`.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        stages = (await client.describe()).stages
        if order.operation is Operation.SCALE:
            pending = _changing([status for status in stages if status.stage == order.stage])
        else:
            place = (order.stage, order.replica)
            pending = _unfinished(next(item for item in stages if (item.stage, item.replica) == place), order, former)
        if not pending:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise RequestTimeout(f"{pending}.", hint="It goes on; look at it with `omni-actors ctl status`.")
        await asyncio.sleep(POLL_SECONDS)


def _changing(replicas: Sequence[StageStatus]) -> str:
    """The replicas of a stage that still come or go, "" for none."""
    dead = [f"{item.stage}/{item.replica}" for item in replicas if item.joining and item.state == "dead"]
    if dead:
        raise StageUnavailable(
            f"{', '.join(dead)} did not start and is given up.",
            hint="Its log says why. Restart it with `omni-actors ctl restart`, or scale the stage down again.",
        )
    changing = [item for item in replicas if item.joining or item.leaving]
    return ", ".join(f"{item.stage}/{item.replica} is {state(item)}" for item in changing)


def _unfinished(status: StageStatus, order: Operate, former: int) -> str:
    """What is left of a drain or a restart, "" for nothing."""
    drained = order.operation is Operation.DRAIN and not status.in_flight
    restarted = order.operation is Operation.RESTART and status.epoch != former and status.state == "ready"
    what = f"{status.stage}/{status.replica} is {status.state} with {counted(status.in_flight, 'request')}"
    return "" if drained or restarted else what


def render(report: Report) -> str:
    """Render a report as text: a line per replica, a line per request, and the counts that are not zero."""
    shown = report.description
    health = "healthy" if shown.healthy else "degraded"
    requests = f"{shown.in_flight} of {shown.max_in_flight} requests in flight, {shown.queued} queued"
    lines = [f"{shown.pipeline}: {health}, {requests}"]
    hosts = any(stage.node for stage in shown.stages)
    edges = {(edge.stage, edge.replica): edge for edge in report.edges}
    for stage in shown.stages:
        text = f"  {stage.stage}/{stage.replica}: {state(stage)}{f' on node {stage.node}' if hosts else ''}"
        text += f", epoch {stage.epoch}, pid {stage.pid}"
        text += f", {counted(stage.in_flight, 'request')}"
        edge = edges.get((stage.stage, stage.replica))
        if edge is not None:
            text += f", {edge.phase}" if edge.phase != stage.state else ""
            text += f", {counted(edge.restarts, 'restart')}, heartbeat {edge.silent:.1f} s ago"
            text += f", progress {edge.idle:.1f} s ago"
            text += f", link: {edge.messages_out} messages and {edge.bytes_out} bytes out, {edge.waiting} waiting"
        lines.append(text)
    for request in report.requests:
        text = f"  request {request.request_id}: {request.state}, attempt {request.attempt}"
        text += f", {' -> '.join(request.route) or 'unbound'}, done: {', '.join(request.stages_done) or 'none'}"
        text += f", {request.remaining:.1f} s left"
        lines.append(f"{text}{''.join(f', lost {loss}' for loss in request.losses)}")
    lines += [f"  {name}: {count}" for name, count in sorted(shown.counts.items()) if count]
    return "\n".join(lines)
