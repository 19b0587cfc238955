"""A node's end of its connection to the coordinator."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import zmq

from omni_actors.host.run_directory import RunDirectory
from omni_actors.launcher.node_agent import NodeAgent
from omni_actors.launcher.replica_processes import ReplicaProcesses
from omni_actors.protocol.codec import Decoder, encode
from omni_actors.protocol.fields import Body, Header, ReplicaId
from omni_actors.protocol.messages import (
    Launched,
    NodeLeaving,
    NodeToCoordinator,
    NodeWelcome,
    ReplicaEnded,
    Shutdown,
    StartReplica,
)
from omni_actors.stage.session import ReplicaSpec
from omni_actors.transport.sockets import Sockets
from tests.support.builders import pipeline
from tests.support.waiting import eventually, until

CONFIG = pipeline()
DECODER: Decoder[NodeToCoordinator] = Decoder(NodeToCoordinator, CONFIG.limits)


class Connected(NamedTuple):
    """An agent, and the coordinator's end of its connection."""

    agent: NodeAgent
    control: zmq.Socket[bytes]
    name: bytes

    def tell(self, *bodies: Body) -> None:
        for body in bodies:
            self.control.send_multipart([self.name, *encode(Header(""), body)])

    def hear(self) -> Iterator[NodeToCoordinator]:
        while self.control.poll(0):
            yield DECODER.decode(self.control.recv_multipart()[1:]).body


@asynccontextmanager
async def connected(
    folder: Path,
    processes: type[ReplicaProcesses] = ReplicaProcesses,
    on_shutdown: Callable[[str, bool], None] = lambda reason, failed: None,
) -> AsyncIterator[Connected]:
    """An agent that has said hello."""
    sockets = Sockets()
    control, endpoint = sockets.router(f"ipc://{folder}/control")
    run_directory = RunDirectory(str(folder / "run"))
    agent = NodeAgent(CONFIG, endpoint, processes(CONFIG, run_directory, endpoint), on_shutdown)
    try:
        until(lambda: control.poll(0))
        yield Connected(agent, control, control.recv_multipart()[0])
    finally:
        await agent.close("a test")
        run_directory.close()
        sockets.context.destroy(linger=0)


class FaultyProcesses(ReplicaProcesses):
    """Processes whose description has an error, as one in our own code would be."""

    def spec(self, identity: ReplicaId, slot: int) -> ReplicaSpec:
        raise KeyError(identity.stage)


async def test_an_error_in_our_code_that_keeps_a_replica_from_starting_is_reported(short_path: Path) -> None:
    """And does not end the task that starts the others."""
    ended: list[ReplicaEnded] = []
    async with connected(short_path, FaultyProcesses) as node:

        def both_ended() -> bool:
            ended.extend(body for body in node.hear() if isinstance(body, ReplicaEnded))
            return len(ended) == 2

        node.tell(*(StartReplica(ReplicaId(stage, 0, 7)) for stage in ("prompt", "thinker")))
        await eventually(both_ended, what=lambda: f"two reports, of {ended}")
        assert [(body.process.stage, body.how) for body in ended] == [
            ("prompt", "cannot start a process: KeyError('prompt')"),
            ("thinker", "cannot start a process: KeyError('thinker')"),
        ]
        assert "in spec" in ended[0].log


async def test_a_drain_is_asked_for_of_each_coordinator_and_ends_at_its_deadline(short_path: Path) -> None:
    asked: list[NodeLeaving] = []
    async with connected(short_path) as node:

        def times() -> int:
            asked.extend(body for body in node.hear() if isinstance(body, NodeLeaving))
            return len(asked)

        node.tell(NodeWelcome(), Launched())
        await eventually(node.agent.launched.is_set)
        await node.agent.drain(0.05)  # no coordinator says that all is finished
        await eventually(lambda: times() == 1)
        node.tell(NodeWelcome())
        await eventually(lambda: times() == 2)
        assert all(body.drains for body in asked)


async def test_last_words_of_a_coordinator_count_though_it_has_left(short_path: Path) -> None:
    """The loop learns of the lost connection before it reads what was said on it."""
    told: list[tuple[str, bool]] = []
    async with connected(short_path, on_shutdown=lambda reason, failed: told.append((reason, failed))) as node:
        node.tell(NodeWelcome(), Shutdown(reason="the launcher stops"))
        node.control.close()
        deadline = time.monotonic() + 20
        while not told and time.monotonic() < deadline:  # the loop shall not read meanwhile
            node.agent.monitor.drain()
        assert told == [("the launcher stops", False)]
