"""Edges between real processes: a peer that comes back as another one, and messages that may not wait for credit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import Aborted
from omni_actors.protocol.messages import Operation, StageStatus
from tests.support.builders import flow_chain
from tests.support.launcher import EchoLauncher
from tests.support.waiting import eventually

Launch = Callable[..., EchoLauncher]


def status(echo: EchoLauncher, stage: str) -> StageStatus:
    return next(status for status in echo.describe().stages if status.stage == stage)


async def test_abort_does_not_queue_behind_what_waits_for_credit(launch):
    """Two requests saturate the prompt stage, which then grants nothing, so that a third one's prompt has to wait."""
    flow: dict[str, Any] = {"edge_bytes": 4096, "backlog_requests": 1}
    echo = launch(flow_chain(flow, prompt={"step_seconds": 0.3})).wait_ready()
    async with AsyncOmniClient(echo.endpoint) as client:
        first, second = [await client.submit("x" * 350, modalities=["text"]) for _ in range(2)]
        await eventually(lambda: status(echo, "prompt").counts.get("engine_requests") == 2, what="both run")
        third = await client.submit("y" * 3800, modalities=["text"], timeout=60)

        async def until_waiting(count: int) -> None:
            async def waiting() -> bool:
                edges = (await client.operate(Operation.STATUS)).edges
                return {edge.stage: edge.waiting for edge in edges}["prompt"] == count

            await eventually(waiting, 10, f"{count} requests to wait for the prompt stage")

        await until_waiting(1)
        assert status(echo, "prompt").counts["engine_requests"] == 2
        async with asyncio.timeout(60):  # alone they take 105 s
            for stream in (first, second):
                await stream.abort()
                with pytest.raises(Aborted):
                    await stream.result()
            await until_waiting(0)
        await third.abort()
        with pytest.raises(Aborted):
            await third.result()
    echo.wait_idle()
