"""CUDA MPS: lets the replicas that share a GPU compute at the same time instead of in turns."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from omni_actors.config import PipelineConfig, host_devices, replica_devices, visible_devices
from omni_actors.config.placement import shared_devices
from omni_actors.envs import MPS_SHARE
from omni_actors.host.processes import at_most, describe_exit
from omni_actors.host.run_directory import MPS_PREFIX, RunDirectory
from omni_actors.logs import get_logger

logger = get_logger(__name__)

CONTROL, CONTROL_FOLDERS = "nvidia-cuda-mps-control", "/usr/local/nvidia/bin:/usr/bin:/usr/sbin"  # besides PATH
PIPES, USUAL_PIPES = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"  # where CUDA looks unless the variable is set
SMI_SECONDS, COUNT_SECONDS = 5.0, 20.0
COUNT = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
failed = cuda.cuInit(0) or cuda.cuDeviceGetAttribute(ctypes.byref(count), 16, 0)
print(0 if failed else count.value)
"""  # of the multiprocessors of the first visible GPU
START_SECONDS, END_SECONDS = 45.0, 15.0  # of the guardian, whose own deadlines end earlier


class MpsClients(NamedTuple):
    """What replicas need to connect to the launcher's daemon, whether they start with it or come later."""

    pipes: str
    uuids: Mapping[str, str]  # a GPU of the daemon as CUDA_VISIBLE_DEVICES names it for this host -> its UUID
    multiprocessors: int = 0  # of each GPU; 0 if that is not known, or no daemon runs

    def apply(
        self, gpus: Sequence[str], environment: Mapping[str, str], most: int | None = None
    ) -> tuple[Sequence[str], dict[str, str]]:
        """Return the GPUs and the variables of a replica's process, given those that it has without MPS.

        Args:
            most: multiprocessors on which it shall compute, of each GPU.
        """
        variables = dict(environment)
        if most is not None and gpus and self.multiprocessors > most:
            variables.setdefault(MPS_SHARE, str(math.ceil(100 * most / self.multiprocessors)))
        if not gpus or not self.uuids.keys() >= set(gpus):
            return gpus, variables
        return [self.uuids[name] for name in gpus], {PIPES: self.pipes, **variables}


NO_MPS = MpsClients("", {})


class MpsChild:
    """Owns the guardian of a private daemon, if there is one. `say` gets one sentence on what was done."""

    def __init__(self, pipeline: PipelineConfig, run_directory: RunDirectory, say: Callable[[str], None]) -> None:
        self._pipeline, self._run_directory, self._say = pipeline, run_directory, say
        self._guardian: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self.clients = NO_MPS

    async def start(self) -> None:
        """Start a daemon if replicas here share a GPU and none answers yet. Never fails: it says why there is none."""
        shared = shared_devices(self._pipeline, self._pipeline.cluster.node_rank, host_devices())
        text = "; ".join(f"GPU {gpu}: {', '.join(f'{n}/{i}' for n, i in users)}" for gpu, users in shared.items())
        pipes = os.environ.get(PIPES, USUAL_PIPES)
        if shared and self._pipeline.mps == "off":
            self._say(f"MPS is off; stages take turns ({text})")
        elif shared and answers(pipes):
            self.clients = MpsClients("", {}, await asyncio.to_thread(self._multiprocessors))
            self._say(f"MPS: using the daemon at {pipes} ({text})")
        elif shared:
            try:
                refused = await self._start_guardian(daemon_gpus(self._pipeline, host_devices()))
            except (OSError, subprocess.SubprocessError) as error:
                refused = str(error) or f"no answer within {START_SECONDS:g} s"
            done = f"refused, continuing without: {refused}; stages take turns" if refused else "started"
            self._say(f"MPS {done} ({text})")

    async def _start_guardian(self, gpus: Sequence[int]) -> str:
        """Start the daemon under its guardian; returns why that is not possible, or ""."""
        path = f"{os.environ.get('PATH', os.defpath)}:{CONTROL_FOLDERS}"
        if (control := shutil.which(CONTROL, path=path)) is None:
            return f"{CONTROL} is not in {path}"
        uuids, multiprocessors = await asyncio.gather(
            asyncio.to_thread(gpu_uuids, visible_devices(gpus)), asyncio.to_thread(self._multiprocessors)
        )
        run = self._run_directory
        folder = str(run.path / f"{MPS_PREFIX}{os.getpid()}")
        variables = {"PATH": path, "CUDA_VISIBLE_DEVICES": ",".join(uuids.values())}  # PATH: to find its server
        self._guardian = guardian = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "omni_actors.launcher.mps_guardian", control, folder),
            *(str(run.log_file("mps")), str(run.path), "temporary" if run.temporary else "given"),
            env={**os.environ, **variables, PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must not reach the daemon before the stages have ended
        )
        async with asyncio.timeout(START_SECONDS):
            line = await guardian.stdout.readline() if guardian.stdout is not None else b""
        if line != b"\n":
            return line.decode().strip() or f"the daemon's guardian died ({describe_exit(await guardian.wait())})"
        self.clients = MpsClients(folder, uuids, multiprocessors)
        self._watching = asyncio.create_task(self._watch(guardian), name="MPS guardian")
        return ""

    def _multiprocessors(self) -> int:
        """Multiprocessors of a GPU here, if a stage is to have a part of them; 0 if none is, or they can't be counted.

        Another process counts: this one must not touch CUDA, and a stage that has can no longer be given a part.
        """
        if all(stage.multiprocessors is None for stage in self._pipeline.stages):
            return 0
        try:
            counted = subprocess.run(
                [sys.executable, "-c", COUNT], capture_output=True, timeout=COUNT_SECONDS, check=True
            )
            return int(counted.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            logger.warning("stages get all multiprocessors, because these cannot be counted: %s", error)
            return 0

    async def _watch(self, guardian: asyncio.subprocess.Process) -> None:
        how = describe_exit(await guardian.wait())
        logger.error("the MPS daemon has ended (guardian: %s); replicas that start from now on take turns", how)

    async def stop(self) -> None:
        """End the daemon, after its clients."""
        if self._watching is not None:
            self._watching.cancel()
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
            await at_most(END_SECONDS, self._guardian.wait())
            if self._guardian.returncode is None:
                logger.error("the MPS daemon did not end within %g s; killing its guardian", END_SECONDS)
                self._guardian.kill()
                await self._guardian.wait()
            if self._guardian.returncode:  # it was killed, and servers outlive their daemon
                await asyncio.to_thread(_sweep, self.clients.pipes)


def _sweep(folder: str) -> None:
    """End what uses a folder of pipes, and remove it."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
            if process.environ().get(PIPES) == folder:
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def daemon_gpus(pipeline: PipelineConfig, devices: int) -> list[int]:
    """Return all GPUs of the replicas on this host that share one with another."""
    shared = shared_devices(pipeline, pipeline.cluster.node_rank, devices)
    replicas = {replica for users in shared.values() for replica in users}
    return sorted({gpu for name, at in replicas for gpu in replica_devices(pipeline.stage(name), at, devices)})


def answers(pipes: str) -> bool:
    """Whether an MPS daemon of this user or of root listens in a folder; the usual one is open to all users."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(Path(pipes) / "control"))
        except OSError:
            return False
        _, owner, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if owner not in (0, os.geteuid()):
        logger.warning("not using the MPS daemon at %s: it belongs to user %d", pipes, owner)
    return owner in (0, os.geteuid())


def gpu_uuids(names: Sequence[str]) -> dict[str, str]:
    """Map GPUs, as CUDA_VISIBLE_DEVICES names them, to their UUIDs.

    A number would be applied twice: by the daemon to all GPUs and by its clients to the daemon's GPUs.

    Raises:
        OSError, subprocess.SubprocessError: nvidia-smi does not work, or does not know a GPU.
    """
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS, check=True).stdout
    known = dict(line.split(", ", 1) for line in said.splitlines() if ", " in line)
    if missing := [name for name in names if name.isdigit() and name not in known]:
        raise OSError(f"nvidia-smi names no GPU {missing[0]}")
    return {name: known.get(name, name) for name in names}
