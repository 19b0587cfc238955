"""A coordinator that cannot carry out what was decided ends, and the launcher starts another one."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path

import msgspec
import pytest

import omni_actors
from omni_actors.client import AsyncOmniClient
from omni_actors.coordinator import CoordinatorSpec, shell
from omni_actors.coordinator.shell import Coordinator
from omni_actors.protocol.codec import encode
from omni_actors.protocol.fields import PROTOCOL_VERSION, Header, identity_of
from omni_actors.protocol.messages import Abort, NodeHello, Operation
from omni_actors.transport.sockets import Sockets
from tests.support.builders import pipeline
from tests.support.waiting import PATIENCE

BROKEN = """
import sys
from omni_actors.coordinator import process
from omni_actors.coordinator.core.fleet import Fleet
from omni_actors.coordinator.core.requests import RequestMachine

def broken(self, *_):
    raise RuntimeError("this is broken")

{} = broken
sys.exit(process.main())
"""


def spec_in(folder: Path) -> CoordinatorSpec:
    return CoordinatorSpec(
        pipeline=pipeline(),
        **{name: f"ipc://{folder}/{name}" for name in ("client", "control", "results")},
        launcher_pid=os.getpid(),
        run_dir=str(folder),
        run_dir_is_temporary=False,
        began=time.monotonic(),
        started=time.monotonic(),
    )


def break_memory(*_: object) -> None:
    """Fail for a reason of which nobody has thought."""
    raise RuntimeError("the memory is broken")


async def test_an_instruction_that_fails_ends_the_coordinator(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "write_memory", break_memory)
    coordinator = Coordinator(spec_in(short_path))
    running = asyncio.create_task(coordinator.run())
    config = pipeline()
    hello = NodeHello(PROTOCOL_VERSION, omni_actors.__version__, config.digest(), (), True, 0)
    coordinator.from_node(0, hello)
    async with AsyncOmniClient(coordinator.client_endpoint) as client:
        order = asyncio.create_task(client.operate(Operation.SCALE, config.stages[0].name, count=2))
        async with asyncio.timeout(10 * PATIENCE):
            with pytest.raises(RuntimeError, match="the memory is broken"):
                await running
        order.cancel()
        await asyncio.gather(order, return_exceptions=True)


@pytest.mark.parametrize("method", ["Fleet.tick", "RequestMachine.abort"])
async def test_a_tick_or_a_message_that_fails_ends_the_process(method: str, short_path: Path, sockets: Sockets) -> None:
    spec = spec_in(short_path)
    command = (sys.executable, "-c", BROKEN.format(method))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert process.stdin
    assert process.stdout
    process.stdin.write(msgspec.json.encode(spec))
    process.stdin.write_eof()
    async with asyncio.timeout(30 * PATIENCE):
        assert b"listening" in await process.stdout.readline()
        node, _ = sockets.dealer(spec.control, identity_of(0))  # before it, no client is served
        digest = spec.pipeline.digest()
        hello = NodeHello(PROTOCOL_VERSION, omni_actors.__version__, digest, (), True, 0)
        node.send_multipart(encode(Header("", replica=0), hello))
        client, _ = sockets.dealer(spec.client, b"a client")
        client.send_multipart(encode(Header("", "r1"), Abort()))
        out, errors = await process.communicate()
    assert process.returncode == 4
    assert b"finished" not in out, "that would be an orderly end"
    assert b"this is broken" in errors
