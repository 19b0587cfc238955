"""CUDA MPS: lets the replicas that share a GPU compute at the same time instead of in turns.

The launcher starts a daemon of its own for these replicas, under a guardian (`mps_guardian.py`) that ends it with the
launcher. A daemon that is already there is used as it is. Where MPS does not work, the pipeline runs without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from omni_actors.config import PipelineConfig, host_devices, replica_devices, visible_devices
from omni_actors.config.devices import COMPUTING_KINDS, shared_devices
from omni_actors.host.processes import describe_exit
from omni_actors.host.run_directory import MPS_PREFIX, RunDirectory
from omni_actors.launcher.mps_guardian import GuardianAnswer, GuardianSpec
from omni_actors.logs import get_logger

logger = get_logger(__name__)

CONTROL = "nvidia-cuda-mps-control"
CONTROL_FOLDERS = ("/usr/local/nvidia/bin", "/usr/bin")  # besides PATH
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
USUAL_FOLDER = "/tmp/nvidia-mps"  # where CUDA looks unless that variable is set
START_SECONDS = 45.0  # the guardian's own deadlines end earlier
STOP_SECONDS = 15.0  # likewise
CONNECT_SECONDS = 1.0
PEER = struct.Struct("3i")  # process, user and group behind a Unix socket

Replica = tuple[str, int]  # stage, index


class MpsPlan(NamedTuple):
    """The replicas of this host that compute under MPS, and the GPUs that they use."""

    shared: Mapping[int, Sequence[Replica]]  # a GPU that several replicas share -> these
    devices: tuple[int, ...]  # also those that such a replica has to itself

    def __str__(self) -> str:
        return "; ".join(
            f"GPU {device}: {', '.join(f'{stage}/{index}' for stage, index in replicas)}"
            for device, replicas in self.shared.items()
        )


def plan(pipeline: PipelineConfig, rank: int, devices: int) -> MpsPlan:
    """Find the replicas of a node, which has this many `devices`, that share a GPU with another one."""
    shared = shared_devices(pipeline, rank, devices)
    replicas = {replica for sharing in shared.values() for replica in sharing}
    used = {device for stage, index in replicas for device in replica_devices(pipeline.stage(stage), index, devices)}
    return MpsPlan(shared, tuple(sorted(used)))


class MpsClients(NamedTuple):
    """Which replicas connect to the launcher's own daemon, and what they need for it.

    They are those whose GPUs the daemon has, whether they were there when it started or came later.
    """

    stages: frozenset[str]  # that compute on GPUs
    pipe_directory: str
    uuids: Mapping[str, str]  # a GPU of the daemon as CUDA_VISIBLE_DEVICES names it for this host -> its UUID

    def apply(
        self, stage: str, visible: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[Sequence[str], dict[str, str]]:
        """Return the GPUs and the variables of a replica's process, given those that it has without MPS."""
        if stage not in self.stages or not visible or not self.uuids.keys() >= set(visible):
            return visible, dict(environment)
        return [self.uuids[name] for name in visible], {PIPE_VARIABLE: self.pipe_directory, **environment}


NO_MPS = MpsClients(frozenset(), "", {})


class MpsChild:
    """Owns the guardian of the MPS daemon, if there is one.

    Args:
        on_decision: called with one sentence that says what was done.
    """

    def __init__(
        self, pipeline: PipelineConfig, run_directory: RunDirectory, on_decision: Callable[[str], None]
    ) -> None:
        self._pipeline = pipeline
        self._run_directory = run_directory
        self._say = on_decision
        self._guardian: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self.clients = NO_MPS

    async def start(self) -> None:
        """Start a daemon if replicas here share a GPU and none runs yet. Never fails: it says why there is none."""
        wanted = plan(self._pipeline, self._pipeline.cluster.node_rank, host_devices())
        if not wanted.shared:
            return
        if self._pipeline.mps == "off":
            self._say(f"MPS is off; stages take turns ({wanted})")
            return
        folder = os.environ.get(PIPE_VARIABLE) or USUAL_FOLDER
        if answers(folder):
            self._say(f"MPS: using the daemon at {folder} ({wanted})")
            return
        try:
            refused = await self._start_guardian(wanted)
        except OSError as error:
            refused = str(error)
        if refused:
            self._say(f"MPS refused, continuing without: {refused}; stages take turns ({wanted})")
        else:
            self._say(f"MPS started ({wanted})")

    async def _start_guardian(self, wanted: MpsPlan) -> str:
        """Start the daemon under its guardian; returns why that is not possible, or ""."""
        if os.environ.get(PIPE_VARIABLE):
            return f"no daemon answers in {PIPE_VARIABLE} {os.environ[PIPE_VARIABLE]}; start it or unset the variable"
        control = find_control(os.environ.get("PATH", os.defpath).split(os.pathsep))
        if control is None:
            return f"{CONTROL} is neither in PATH nor in {' or '.join(CONTROL_FOLDERS)}"
        folder = self._run_directory.path / f"{MPS_PREFIX}{os.getpid()}"
        spec = GuardianSpec(
            control=control,
            folder=str(folder),
            devices=tuple(visible_devices(wanted.devices)),
            log_file=str(self._run_directory.log_file("mps")),
            run_dir=str(self._run_directory.path),
            run_dir_is_temporary=self._run_directory.temporary,
        )
        self._guardian = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "omni_actors.launcher.mps_guardian",
            msgspec.json.encode(spec).decode(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must not reach the daemon before the stages have ended
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                answer = await self._answer(self._guardian)
        except TimeoutError:
            self._guardian.kill()
            return f"no answer within {START_SECONDS:g} s"
        if not answer.refused:
            computing = frozenset(stage.name for stage in self._pipeline.stages if stage.kind in COMPUTING_KINDS)
            self.clients = MpsClients(computing, str(folder), answer.uuids)
            self._watching = asyncio.create_task(self._watch(self._guardian), name="MPS guardian")
        return answer.refused

    @staticmethod
    async def _answer(guardian: asyncio.subprocess.Process) -> GuardianAnswer:
        line = await guardian.stdout.readline() if guardian.stdout is not None else b""
        if line:
            return msgspec.json.decode(line, type=GuardianAnswer)
        return GuardianAnswer(refused=f"the daemon's guardian died ({describe_exit(await guardian.wait())})")

    async def _watch(self, guardian: asyncio.subprocess.Process) -> None:
        how = describe_exit(await guardian.wait())
        logger.error("the MPS daemon has ended (guardian: %s); replicas that start from now on take turns", how)

    async def stop(self) -> None:
        """End the daemon, after its clients. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        guardian, self._guardian = self._guardian, None
        if guardian is None:
            return
        if guardian.stdin is not None:
            guardian.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await guardian.wait()
        if guardian.returncode is None:
            logger.error("the MPS daemon did not end; killing its guardian")
            guardian.kill()
            await guardian.wait()


def find_control(folders: Iterable[str]) -> str | None:
    """Return the path of the daemon's program: from `folders`, else from where drivers install it."""
    return shutil.which(CONTROL, path=os.pathsep.join([*folders, *CONTROL_FOLDERS]))


def answers(folder: str) -> bool:
    """Whether an MPS daemon of this user or of root listens in `folder`; the usual one is open to all users."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_SECONDS)
        try:
            probe.connect(str(Path(folder) / "control"))
        except OSError:
            return False
        _, owner, _ = PEER.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    if owner not in (0, os.geteuid()):
        logger.warning("not using the MPS daemon at %s: it belongs to user %d", folder, owner)
        return False
    return True
