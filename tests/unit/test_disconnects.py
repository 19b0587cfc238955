"""Cut TCP links are detected; links of this host are not watched."""

from __future__ import annotations

from pathlib import Path

import zmq

from omni_actors.transport.disconnects import GRACE_SECONDS, DisconnectDetector
from omni_actors.transport.sockets import Socket, Sockets, drain, try_send
from tests.support.waiting import until


def linked(sockets: Sockets, endpoint: str) -> tuple[Socket, Socket, str]:
    """A PUSH, the PULL that has received a message from it, and the endpoint."""
    pull, endpoint = sockets.pull(endpoint)
    push = sockets.push(endpoint)
    until(lambda: try_send(push, [b"x"]), what="a connection")
    until(lambda: pull.poll(0), what="the message")
    return push, pull, endpoint


def test_a_cut_link_is_found_once_its_peer_could_have_been_announced_dead(sockets: Sockets) -> None:
    push, pull, endpoint = linked(sockets, "tcp://127.0.0.1:0")
    detector: DisconnectDetector[str] = DisconnectDetector()
    detector.watch("talker", push, endpoint)
    assert detector.found(0.0) == []
    pull.close()
    until(lambda: push.poll(0, zmq.POLLOUT) == 0, what="the loss of the connection")

    def is_found() -> bool:
        return detector.found(10.0) == [] and detector.found(10.0 + GRACE_SECONDS) == ["talker"]

    until(is_found, what="its detection")
    detector.forget("talker")
    assert detector.found(99.0) == []
    detector.close()


def test_a_socket_file_is_not_watched(sockets: Sockets, short_path: Path) -> None:
    push, pull, endpoint = linked(sockets, f"ipc://{short_path}/inbox")
    detector: DisconnectDetector[str] = DisconnectDetector()
    detector.watch("talker", push, endpoint)
    monitor = push.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    pull.close()
    until(lambda: drain(monitor), what="the disconnection")
    assert detector.found(0.0) == []
    assert detector.found(99.0) == []
    push.disable_monitor()
    monitor.close(linger=0)
    detector.close()
