"""One node of a pipeline on a Ray cluster: the actor there, and the process that holds its launcher.

The actor starts `python -m omni_actors.launcher.ray_node`, sends it one line, the command with the pipeline's keys, and
keeps its standard input open. The launcher ends in order when that closes, and so with the actor, however it ends; the
actor ends with the raylet of its node. Keys are on no command line, in no environment and in no argument that Ray
stores (docs/decisions.md).
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from omni_actors.host.processes import EXIT_FAILED, describe_exit
from omni_actors.host.run_directory import short_temporary_folder
from omni_actors.launcher import exit_with_stdin

HOLDER = "omni_actors.launcher.ray_node"
FOLLOW_SECONDS = 1.0
MOST_LINES = 1000  # of one answer
# Of Ray's workers: 1, the default, would kill the launcher with the actor and leave it no time to end in order.
ACTOR_VARIABLES = {"RAY_kill_child_processes_on_worker_exit": "0"}

RAYLET = "RAY_RAYLET_PID"  # of the node, in the environment of Ray's workers
OF_A_RAY_WORKER = {*ACTOR_VARIABLES, "RAY_CLIENT_MODE", "RAY_JOB_ID", RAYLET}  # not for what it starts


class Order(msgspec.Struct, frozen=True):
    """What a node's holder gets on its standard input, as one line of JSON.

    Args:
        command: the launcher's, without `--keys`.
        keys: files of the key folder, by name; none for a pipeline without keys.
    """

    command: list[str]
    keys: dict[str, str] = {}


class LauncherOutput(NamedTuple):
    """What a launcher has printed since the last report, and its exit code once all of it is there."""

    lines: list[str]
    code: int | None


class RayNode:
    """The actor on one node. `follow` waits, so that Ray runs its methods in threads."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=_end_with, args=(int(os.environ[RAYLET]),), daemon=True, name="raylet").start()

    def address(self) -> tuple[str, int]:
        """Address of this node in the cluster, and a port that is free on it now."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as listener:
            listener.bind((host, 0))
            return host, listener.getsockname()[1]

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], keys: Mapping[str, str]) -> None:
        """Start a launcher.

        Args:
            arguments: those of `omni_actors.launch`, without `--keys`.
            variables: environment, in addition to this process's own.
            keys: files of the pipeline's key folder, by name.
        """
        command = [sys.executable, "-m", "omni_actors.launch", *arguments]
        environment = {name: value for name, value in os.environ.items() if name not in OF_A_RAY_WORKER}
        self._process = subprocess.Popen(
            [sys.executable, "-m", HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ray kills the process groups of a job that has ended
            env={**environment, "PYTHONUNBUFFERED": "1", **variables},
        )
        if (held := self._process.stdin) is not None:
            held.write(msgspec.json.encode(Order(command, dict(keys))) + b"\n")
            held.flush()
        threading.Thread(target=self._read, args=(self._process,), daemon=True, name="lines").start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        for line in process.stdout or ():
            self._lines.put(line.decode(errors="replace").rstrip("\n"))
        if process.stdout is not None:
            process.stdout.close()
        self._lines.put(None)

    def follow(self) -> LauncherOutput:
        """Wait a moment for lines of the launcher, or for its end."""
        lines: list[str] = []
        with contextlib.suppress(queue.Empty):
            while len(lines) < MOST_LINES:
                line = self._lines.get(timeout=0 if lines else FOLLOW_SECONDS)
                if line is None:
                    return LauncherOutput(lines, self._process.wait() if self._process is not None else None)
                lines.append(line)
        return LauncherOutput(lines, None)

    def stop(self) -> None:
        """Ask the launcher to end in order. Idempotent."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()


def _end_with(raylet: int) -> None:
    """End this process with the raylet of its node, and so the launcher.

    Ray's workers do that themselves, but ask whether the raylet's pid exists: until its parent has collected it, it
    does. By then the cluster counts the node as lost, and asks nothing of its actors any more.
    """
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(raylet)], [], [])
    os._exit(EXIT_FAILED)


def main() -> int:
    """Hold a launcher: read the order, write the keys, run the command until it ends or standard input closes."""
    line = b""
    while not line.endswith(b"\n"):  # nothing comes after it
        piece = os.read(0, 65536)
        if not piece:
            return exit_with_stdin.EXIT_NOT_FOUND
        line += piece
    order = msgspec.json.decode(line, type=Order)
    if not order.keys:
        return exit_with_stdin.main(order.command)
    with tempfile.TemporaryDirectory(prefix="omni-keys-", dir=short_temporary_folder()) as folder:  # for us alone
        for name, text in order.keys.items():
            path = Path(folder, name)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(text)
        return exit_with_stdin.main([*order.command, "--keys", folder])


def describe_end(code: int) -> str:
    """Say how a launcher ended, for a person."""
    return describe_exit(128 - code if code > 128 else code)


if __name__ == "__main__":
    sys.exit(main())
