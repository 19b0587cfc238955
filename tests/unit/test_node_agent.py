"""A node's end of its connection to the coordinator."""

from __future__ import annotations

import time
from pathlib import Path

from omni_actors.launcher.node_agent import NodeAgent
from omni_actors.launcher.replica_processes import ReplicaProcesses
from omni_actors.protocol.codec import encode
from omni_actors.protocol.control import Shutdown
from omni_actors.protocol.header import Header
from omni_actors.protocol.nodes import NodeWelcome
from omni_actors.run_directory import RunDirectory
from omni_actors.transport.sockets import Sockets
from tests.support.builders import pipeline
from tests.support.waiting import until


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
