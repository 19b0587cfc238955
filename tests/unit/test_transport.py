"""Run directory, sockets, links, readers and wakeups: real sockets in one process."""

from __future__ import annotations

import asyncio
import os
import socket as sockets_of_python
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from zmq import EVENTS

from omni_actors.errors import ConfigError, InvalidRequest, ProtocolError
from omni_actors.host.run_directory import RunDirectory, clear_abandoned
from omni_actors.transport.link import Link
from omni_actors.transport.sockets import PeerGone, SocketReader, Sockets, drain, try_send
from tests.support.clock import Clock
from tests.support.waiting import eventually, until


def leave_socket(path: Path) -> None:
    with sockets_of_python.socket(sockets_of_python.AF_UNIX) as one:
        one.bind(str(path))


# -- run directory ----------------------------------------------------------------------------------------------------


def test_temporary_folder_is_private_and_removed() -> None:
    run = RunDirectory()
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert run.temporary
    leave_socket(run.path / "inbox")
    run.close()
    assert not run.path.exists()
    run.close()


def test_given_folder_is_swept_locked_and_kept(short_path: Path) -> None:
    folder = short_path / "run"
    folder.mkdir(mode=0o755)
    leave_socket(folder / "client")
    (folder / "note").write_text("mine")
    run = RunDirectory(str(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not (folder / "client").exists()
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        RunDirectory(str(folder))
    leave_socket(folder / "inbox")
    run.close()
    assert sorted(entry.name for entry in folder.iterdir()) == ["logs", "note"]
    RunDirectory(str(folder)).close()


@pytest.mark.parametrize("temporary", [True, False])
def test_an_abandoned_folder_is_cleared_but_not_one_in_use(short_path: Path, temporary: bool) -> None:
    folder = short_path / "run"
    hold = (
        "import sys, time; from omni_actors.host.run_directory import RunDirectory;"
        "run = RunDirectory(sys.argv[1]); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(folder)], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"held\n"
        leave_socket(folder / "client")
        clear_abandoned(folder, temporary)
        assert (folder / "client").exists(), "its launcher is running"
        launcher.kill()
    clear_abandoned(folder, temporary)
    assert folder.exists() is not temporary
    if not temporary:
        assert [entry.name for entry in folder.iterdir()] == ["logs"]
    clear_abandoned(folder, temporary)


def test_bad_endpoints_are_typed_errors(sockets: Sockets, short_path: Path) -> None:
    for make in (lambda: sockets.push("nonsense"), lambda: sockets.dealer("tcp://nowhere", b"x")):
        with pytest.raises(InvalidRequest, match="is not an endpoint"):
            make()
    with pytest.raises(ProtocolError, match="Cannot bind"):
        sockets.pull(f"ipc://{short_path}/missing/inbox")


# -- sockets and links ------------------------------------------------------------------------------------------------


def test_router_raises_when_a_peer_is_gone(sockets: Sockets, short_path: Path) -> None:
    router, endpoint = sockets.router(f"ipc://{short_path}/r")
    with pytest.raises(PeerGone):
        try_send(router, [b"alice", b"x"])
    dealer, handshake = sockets.dealer(endpoint, b"alice")
    try_send(dealer, [b"hello"])
    until(lambda: drain(router) == [[b"alice", b"hello"]], what="the message")
    assert try_send(router, [b"alice", b"x"])
    handshake.close()
    dealer.close()

    def gone() -> bool:
        try:
            return not try_send(router, [b"alice", b"x"])
        except PeerGone:
            return True

    until(gone, what="the loss of the peer")


def test_link_is_bounded_in_messages_and_bytes(sockets: Sockets, short_path: Path) -> None:
    link = Link(sockets.push(f"ipc://{short_path}/absent"), Clock(), outbox_messages=3, outbox_bytes=100)
    assert link.send("big", [bytes(200)]), "one message may be larger than the bound"
    assert not link.send("next", [b"x"])
    assert link.give_up() == ["big"]
    assert link.backlog == 0
    assert [link.send(name, [b"x"]) for name in ("a", "b", "a", "c")] == [True, True, True, False]
    assert link.give_up() == ["a", "b"]
    assert link.send("d", [bytes(100)])


async def test_reader_survives_a_callback_that_raises(sockets: Sockets, short_path: Path) -> None:
    pull, endpoint = sockets.pull(f"ipc://{short_path}/p")
    push = sockets.push(endpoint)
    got: list[bytes] = []
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(str(context["exception"])))

    def on_message(frames: Sequence[bytes]) -> None:
        got.append(frames[0])
        if frames[0] == b"first":
            until(lambda: sum(try_send(push, [b"more"]) for _ in range(3)) == 3, what="room for three messages")
            until(lambda: pull.poll(0), what="a message")
            time.sleep(0.1)
            pull.getsockopt(EVENTS)  # uses up the descriptor's edge: nothing will signal what waits
            raise RuntimeError("a bug")

    reader = SocketReader(pull, on_message)
    await asyncio.sleep(0.05)  # it has looked at the socket once
    until(lambda: try_send(push, [b"first"]), what="a connection")
    await eventually(lambda: len(got) == 4, what="four messages")
    assert errors == ["a bug"]
    reader.close()


FLOODED = """
import sys, time
from omni_actors.transport.sockets import Sockets, try_send, TCP_HEARTBEAT_MS
sockets = Sockets()
router, _ = sockets.router(sys.argv[1])
print("bound", flush=True)
peer = router.recv_multipart()[0]
while try_send(router, [peer, bytes(4000)]):
    pass
print("full", flush=True)
sys.stdin.readline()
time.sleep(3 * TCP_HEARTBEAT_MS / 1000)
"""
FLOODING = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.SNDHWM, 0)
socket.setsockopt(zmq.RCVHWM, 1)
socket.connect(sys.argv[1])
for _ in range(20_000):
    socket.send(bytes(1000))
sys.stdin.readline()
"""


def test_a_process_that_reads_nothing_outlives_a_flooding_peer_that_is_killed(short_path: Path) -> None:
    """libzmq would abort it at the next heartbeat."""
    arguments = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    endpoint = f"ipc://{short_path}/router"
    with subprocess.Popen([sys.executable, "-c", FLOODED, endpoint], **arguments) as flooded:
        assert flooded.stdout.readline() == "bound\n"
        with subprocess.Popen([sys.executable, "-c", FLOODING, endpoint], **arguments) as peer:
            assert flooded.stdout.readline() == "full\n"
            peer.kill()
        _, errors = flooded.communicate("\n", timeout=60)
    assert (flooded.returncode, errors) == (0, "")
