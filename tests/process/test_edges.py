"""Edges between real processes: a peer that comes back as another one, and messages that may not wait for credit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import pytest

from omni_actors.client import AsyncOmniClient, Text
from omni_actors.errors import Aborted
from omni_actors.protocol.client import Operation, StageStatus
from omni_actors.protocol.codec import encode
from omni_actors.protocol.common import Credit
from omni_actors.protocol.fields import pack_token_ids
from omni_actors.protocol.header import Body, Header, ReplicaId
from omni_actors.protocol.stage import Chunk
from omni_actors.transport.sockets import Sockets, try_send
from tests.support.answers import assert_echo
from tests.support.builders import flow_chain
from tests.support.launcher import EchoLauncher
from tests.support.waiting import eventually, until

Launch = Callable[..., EchoLauncher]


def status(echo: EchoLauncher, stage: str) -> StageStatus:
    return next(status for status in echo.describe().stages if status.stage == stage)


def inject(sockets: Sockets, echo: EchoLauncher, stage: str, header: Header, body: Body) -> None:
    """Send a message to a stage's inbox as if another process had."""
    (inbox,) = (path for path in echo.folder.rglob(f"{stage}-0-{status(echo, stage).epoch}"))
    socket = sockets.push(f"ipc://{inbox}")
    until(lambda: try_send(socket, encode(header, body)), 5, "sending")


@pytest.mark.nightly
async def test_restarted_peer(launch: Launch, sockets: Sockets) -> None:
    """Late messages of the former life are counted and dropped, the new one works, no credit is lost or gained."""
    small = {"edge_messages": 64}
    step = {"step_seconds": 0.003}
    echo = launch(flow_chain(small, thinker=step, talker=step)).wait_ready()
    before = status(echo, "talker")
    old = ReplicaId("talker", 0, before.epoch)
    async with AsyncOmniClient(echo.endpoint) as client:
        tasks = [asyncio.create_task(client.generate(f"{n}" * 200, timeout=60)) for n in range(8)]
        await eventually(lambda: status(echo, "code2wav").counts.get("requests"), what="the requests")
        last = status(echo, "code2wav").pid
        psutil.Process(last).suspend()  # what the talker sends lies in its inbox now
        try:
            await eventually(
                lambda: status(echo, "talker").counts.get("outbox"), what="as many chunks as the edge may hold"
            )
            psutil.Process(before.pid).kill()
            await asyncio.to_thread(until, lambda: status(echo, "talker").epoch > old.epoch, 3, "the restart")
        finally:
            psutil.Process(last).resume()
        for number, task in enumerate(tasks):
            assert_echo(await task, f"{number}" * 200)
        dropped = status(echo, "code2wav").counts
        assert dropped.get("dropped_late", 0) + dropped.get("dropped_foreign_epoch", 0) > 0, dropped

        # One by one, about a request that runs: neither its input nor the account of any edge may change.
        running = await client.submit("z" * 600, request_id="mine", timeout=60)
        first = await anext(running)  # by then all stages have it
        assert isinstance(first, Text)
        ghost = Header("", "mine", *msgspec.structs.astuple(old))
        foreign = dropped.get("dropped_foreign_epoch", 0)
        inject(sockets, echo, "code2wav", ghost, Chunk(token_ids=pack_token_ids([1, 2])))
        unknown = status(echo, "thinker").counts.get("dropped_credit_of_unknown_peer", 0)
        inject(sockets, echo, "thinker", ghost, Credit(messages=10**6, bytes=10**9, released=(1, 2, 3)))

        def counted() -> bool:
            now = status(echo, "code2wav").counts.get("dropped_foreign_epoch", 0)
            return now == foreign + 1 and (
                status(echo, "thinker").counts.get("dropped_credit_of_unknown_peer", 0) == unknown + 1
            )

        await asyncio.to_thread(until, counted, 5, lambda: f"{status(echo, 'code2wav')} {status(echo, 'thinker')}")
        output = await running.result()  # what was not read before
        output.text, output.token_ids = first.text + output.text, [*first.token_ids, *output.token_ids]
        assert_echo(output, "z" * 600)

        # 600 chunks have gone over an edge of 64 messages: the new life grants, and the account is even again.
        async def is_even() -> bool:
            edges = (await client.operate(Operation.STATUS)).edges
            return not any(edge.messages_out or edge.bytes_out or edge.waiting for edge in edges)

        await eventually(is_even, 10, "all credit to be returned")
    echo.wait_idle()


async def test_abort_does_not_queue_behind_what_waits_for_credit(launch: Launch) -> None:
    """Two requests saturate the prompt stage, which then grants nothing, so that a third one's prompt has to wait."""
    flow: dict[str, Any] = {"edge_bytes": 4096, "backlog_requests": 1}
    echo = launch(flow_chain(flow, prompt={"step_seconds": 0.05})).wait_ready()
    async with AsyncOmniClient(echo.endpoint) as client:
        first, second = [await client.submit("x" * 350, modalities=["text"]) for _ in range(2)]
        await asyncio.sleep(0.3)
        third = await client.submit("y" * 3800, modalities=["text"], timeout=60)

        async def until_waiting(count: int) -> None:
            async def waiting() -> bool:
                edges = (await client.operate(Operation.STATUS)).edges
                return {edge.stage: edge.waiting for edge in edges}["prompt"] == count

            await eventually(waiting, 10, f"{count} requests to wait for the prompt stage")

        await until_waiting(1)
        assert status(echo, "prompt").counts["engine_requests"] == 2
        async with asyncio.timeout(4):  # alone they take 17 s
            for stream in (first, second):
                await stream.abort()
                with pytest.raises(Aborted):
                    await stream.result()
            await until_waiting(0)
        await third.abort()
        with pytest.raises(Aborted):
            await third.result()
    echo.wait_idle()
