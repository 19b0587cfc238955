"""A node's end of its connection to the coordinator."""

from __future__ import annotations

import time
from pathlib import Path

from omni_actors.launcher.node_agent import NodeAgent
from omni_actors.launcher.replica_processes import ReplicaProcesses
from omni_actors.protocol.codec import Decoder, encode
from omni_actors.protocol.control import Shutdown
from omni_actors.protocol.header import Header, ReplicaId
from omni_actors.protocol.nodes import Launched, NodeLeaving, NodeToCoordinator, NodeWelcome, ReplicaEnded, StartReplica
from omni_actors.run_directory import RunDirectory
from omni_actors.stage.process import ReplicaSpec
from omni_actors.transport.sockets import Sockets
from tests.support.builders import pipeline
from tests.support.waiting import eventually, until


class FaultyProcesses(ReplicaProcesses):
    """Processes whose description has an error, as one in our own code would be."""

    def spec(self, identity: ReplicaId, slot: int, leader: str = "") -> ReplicaSpec:
        raise KeyError(identity.stage)


async def test_an_error_in_our_code_that_keeps_a_replica_from_starting_is_reported(short_path: Path) -> None:
    """And does not end the task that starts the others."""
    sockets = Sockets()
    control, endpoint = sockets.router(f"ipc://{short_path}/control")
    config = pipeline()
    run_directory = RunDirectory(str(short_path / "run"))
    agent = NodeAgent(config, endpoint, FaultyProcesses(config, run_directory, endpoint), lambda reason, failed: None)
    decoder: Decoder[NodeToCoordinator] = Decoder(NodeToCoordinator, config.limits)
    ended: list[ReplicaEnded] = []

    def both_ended() -> bool:
        while control.poll(0):
            body = decoder.decode(control.recv_multipart()[1:]).body
            ended.extend([body] if isinstance(body, ReplicaEnded) else [])
        return len(ended) == 2

    try:
        until(lambda: control.poll(0))
        name = control.recv_multipart()[0]
        for stage in ("prompt", "thinker"):
            control.send_multipart([name, *encode(Header(""), StartReplica(stage, 0, 7))])
        await eventually(both_ended, what=lambda: f"two reports, of {ended}")
        assert [(body.stage, body.how) for body in ended] == [
            ("prompt", "cannot start a process: KeyError('prompt')"),
            ("thinker", "cannot start a process: KeyError('thinker')"),
        ]
        assert "in spec" in ended[0].log
    finally:
        await agent.close("a test")
        run_directory.close()
        sockets.context.destroy(linger=0)


async def test_a_drain_is_asked_for_of_each_coordinator_and_ends_at_its_deadline(short_path: Path) -> None:
    sockets = Sockets()
    control, endpoint = sockets.router(f"ipc://{short_path}/control")
    config = pipeline()
    run_directory = RunDirectory(str(short_path / "run"))
    agent = NodeAgent(config, endpoint, ReplicaProcesses(config, run_directory, endpoint), lambda reason, failed: None)
    decoder: Decoder[NodeToCoordinator] = Decoder(NodeToCoordinator, config.limits)
    asked: list[NodeLeaving] = []

    def times() -> int:
        while control.poll(0):
            body = decoder.decode(control.recv_multipart()[1:]).body
            asked.extend([body] if isinstance(body, NodeLeaving) else [])
        return len(asked)

    try:
        until(lambda: control.poll(0))
        name = control.recv_multipart()[0]
        for body in (NodeWelcome(), Launched()):
            control.send_multipart([name, *encode(Header(""), body)])
        await eventually(agent.launched.is_set)
        await agent.drain(0.05)  # no coordinator says that all is finished
        await eventually(lambda: times() == 1)
        control.send_multipart([name, *encode(Header(""), NodeWelcome())])
        await eventually(lambda: times() == 2)
        assert all(body.drains for body in asked)
    finally:
        await agent.close("a test")
        run_directory.close()
        sockets.context.destroy(linger=0)


async def test_last_words_of_a_coordinator_count_though_it_has_left(short_path: Path) -> None:
    """The loop learns of the lost connection before it reads what was said on it."""
    sockets = Sockets()
    control, endpoint = sockets.router(f"ipc://{short_path}/control")
    config = pipeline()
    told: list[tuple[str, bool]] = []
    run_directory = RunDirectory(str(short_path / "run"))
    processes = ReplicaProcesses(config, run_directory, endpoint)
    agent = NodeAgent(config, endpoint, processes, lambda reason, failed: told.append((reason, failed)))
    try:
        until(lambda: control.poll(0))
        name = control.recv_multipart()[0]
        for body in (NodeWelcome(), Shutdown(reason="the launcher stops")):
            control.send_multipart([name, *encode(Header(""), body)])
        control.close()
        time.sleep(0.2)  # noqa: ASYNC251 - the loop shall not read meanwhile
        agent.monitor.drain()
        assert told == [("the launcher stops", False)]
    finally:
        await agent.close("a test")
        run_directory.close()
        sockets.context.destroy(linger=0)
