"""The stage processes of one host: starts replicas, notices at once when one ends, frees what they held.

A segment belongs to the replicas whose processes (with their descendants, such as vLLM's workers) hold it when it is
first seen, unless any other process of this host holds it, too. It is removed when the last of these replicas is dead.
Looking is cheap while no new names appear in /dev/shm; only for new ones are the processes searched.

Python's resource tracker alone, which the fork server shares with its processes, removes what a killed one left only
when the launch ends (tried on 2026-11-25 with `SharedMemory`; it does so after a SIGKILL of the launcher, too).

What a process makes and is killed for within `LOOK_SECONDS` may be missed.

Replicas are forked from a server that has imported vLLM once: a stage then starts in a second or two instead
of ten, also after a crash, and all stages share the memory of the imported code. The fork server never touches CUDA.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import msgspec
import psutil

from omni_actors.config import PipelineConfig, host_devices, visible_devices
from omni_actors.config.checkpoint import MODEL_KINDS
from omni_actors.config.placement import replicas_of, runs_models, slot_devices, spans_hosts, threads_of
from omni_actors.errors import StartupError
from omni_actors.host import segments
from omni_actors.host.processes import at_most, describe_exit, end_tasks, start_resource_tracker, until_done
from omni_actors.host.run_directory import RunDirectory
from omni_actors.host.segments import Segment
from omni_actors.launcher.mps import NO_MPS
from omni_actors.logs import get_logger
from omni_actors.protocol.fields import ReplicaId
from omni_actors.stage.process import main
from omni_actors.stage.session import ReplicaSpec

logger = get_logger(__name__)

LOOK_SECONDS = 0.25
GRACE_SECONDS = 1.0  # after a death, for helpers of the dead process that remove segments themselves


class SegmentLedger:
    """Not thread-safe.

    Args:
        file: where the list of the replicas' segments is kept, for others to remove them.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen = segments.existing()
        self._owners: dict[Segment, set[ReplicaId]] = {}

    def look(self, processes: Mapping[ReplicaId, int]) -> None:
        """Find which of these replicas (replica -> pid) own the segments that are new since the last look."""
        present = segments.existing()
        new = {segment.name: segment for segment in present - self._seen}
        self._seen = present
        before = len(self._owners)
        self._owners = {segment: owners for segment, owners in self._owners.items() if segment in present}
        found = _owners(processes, new) if new else {}
        self._owners |= found
        if found or len(self._owners) != before:
            segments.write_list(self._file, self._owners)

    def sweep(self, dead: Iterable[ReplicaId]) -> None:
        """Remove the segments that belong to these replicas and to no living one."""
        for replica in dead:
            for owners in self._owners.values():
                owners.discard(replica)
        left = [segment for segment, owners in self._owners.items() if not owners]
        if left:
            logger.debug("removing shared memory of dead replicas: %s", ", ".join(segment.name for segment in left))
            segments.remove(left)
            self._owners = {segment: owners for segment, owners in self._owners.items() if owners}
            segments.write_list(self._file, self._owners)

    def close(self) -> None:
        """Remove everything that is left of all replicas."""
        segments.remove(self._owners)
        self._owners.clear()
        self._file.unlink(missing_ok=True)


def _owners(processes: Mapping[ReplicaId, int], new: Mapping[str, Segment]) -> dict[Segment, set[ReplicaId]]:
    """Find which of `new`, by name, are held by these replicas and by no one else."""
    parents = {process.pid: process.info["ppid"] for process in psutil.process_iter(["ppid"])}
    replicas = {pid: replica for replica, pid in processes.items()}

    def replica_of(pid: int | None) -> ReplicaId | None:
        while pid is not None:
            if pid in replicas:
                return replicas[pid]
            pid = parents.get(pid)
        return None

    holders: dict[str, set[ReplicaId | None]] = {}
    for pid in parents:
        for name in segments.held_by(pid) & new.keys():
            holders.setdefault(name, set()).add(replica_of(pid))
    return {
        new[name]: {replica for replica in replicas_of_name if replica is not None}
        for name, replicas_of_name in holders.items()
        if None not in replicas_of_name
    }


SERVER_MODULE = "omni_actors.launcher.fork_server"
MODEL_PRELOAD = "omni_actors.engine.workers.preload"  # torch and vLLM
LIGHT_PRELOAD = "omni_actors.stage.process"
TAIL_LINES = 20
POLL_SECONDS = 0.02
SERVER_LOST = 255  # exit code of a process, perhaps still alive, whose fork server has died
KILL_SECONDS = 2.0  # for the system to remove a killed process


_starting = threading.Lock()


def start_light(process: ForkServerProcess) -> None:
    """Start a process that does not import this process's main module.

    multiprocessing would have it do so before anything else: the launcher's main module, with all that it imports, took
    longer than all else that a stage does before it has its engine.
    """
    with _starting:
        main_module, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main_module


def _fork_servers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "multiprocessing.forkserver" in " ".join(child.cmdline()):
                found.append(child)
    return found


class ReplicaProcesses:
    """Owns the stage processes of this host; each is identified by the epoch with which it was started.

    `on_exit` is called in the event loop with a replica's identity, a phrase on how its process ended, and its exit
    code.

    Args:
        address: address of this host, for those of its stages that other nodes must reach.
    """

    def __init__(
        self, pipeline: PipelineConfig, run_directory: RunDirectory, control_endpoint: str, address: str = "127.0.0.1"
    ) -> None:
        self._address = address
        self._pipeline = pipeline
        self._run_directory = run_directory
        self._control_endpoint = control_endpoint
        self.on_exit: Callable[[ReplicaId, str, int | None], None] = lambda identity, how, code: None
        self.mps = NO_MPS  # set before the first start
        self._processes: dict[ReplicaId, ForkServerProcess] = {}
        self._started: dict[ReplicaId, psutil.Process] = {}  # the same ones, known by more than their pid
        self._dead: dict[ReplicaId, float] = {}  # since when, until their shared memory is removed
        self._ledger: SegmentLedger | None = None
        self._looking: asyncio.Task[None] | None = None
        self._stopping = False
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._here = replicas_of(pipeline, pipeline.cluster.node_rank)
        preload = MODEL_PRELOAD if runs_models(pipeline, pipeline.cluster.node_rank) else LIGHT_PRELOAD
        self._context.set_forkserver_preload([preload, SERVER_MODULE])

    async def warm_up(self) -> None:
        """Start the fork server ahead of time: its imports take a while, and the first `start` waits for them."""
        start_resource_tracker()
        await asyncio.get_running_loop().run_in_executor(None, forkserver.ensure_running)

    def running(self) -> dict[ReplicaId, int]:
        """Return the processes that have not ended: identity -> pid."""
        return {identity: process.pid or 0 for identity, process in self._processes.items()}

    async def kill_former(self, identity: ReplicaId) -> None:
        """End older processes of the same replica: two of them would compete for its devices."""
        for former in [other for other in self._processes if other.name == identity.name and other != identity]:
            logger.warning("killing %s of epoch %d, which is replaced", former.name, former.epoch)
            self.kill_replica(former)
            for _ in range(int(KILL_SECONDS / POLL_SECONDS)):
                if former not in self._processes:
                    break
                await asyncio.sleep(POLL_SECONDS)

    async def start(self, identity: ReplicaId, slot: int) -> None:
        """Start one replica on the GPUs of a slot. Returns once its process exists.

        The first call waits for the fork server's imports.
        Never cancel it, as that could leave a process that no one owns; `refuse_starts` can interrupt the wait.
        """
        if self._stopping:
            raise StartupError("The launcher is stopping.", hint="")
        if self._ledger is None:
            self._ledger = SegmentLedger(self._run_directory.segments)
            self._looking = asyncio.create_task(self._watch_segments(self._ledger), name="shared memory")
        process = self._context.Process(target=main, args=(self.spec(identity, slot),), name=f"omni:{identity.stage}")
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(None, start_light, process)
        await until_done(starting, _fork_servers)  # with one all its stages end, and the next start has another
        await starting
        self._processes[identity] = process
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
            self._started[identity] = psutil.Process(process.pid)
        self._none_left.clear()
        loop.add_reader(process.sentinel, self._ended, identity)
        logger.debug("%s is process %s", identity.name, process.pid)

    async def _watch_segments(self, ledger: SegmentLedger) -> None:
        """Keep the ledger of the replicas' shared memory, and remove what the dead ones have left."""
        loop = asyncio.get_running_loop()
        while True:
            due = [identity for identity, died in self._dead.items() if died + GRACE_SECONDS < loop.time()]
            try:
                await asyncio.to_thread(ledger.look, self.running())
                ledger.sweep(due)
            except OSError as error:  # the disk is full, for instance: the list cannot be written; try again
                logger.warning("shared memory of dead stages may stay: %s", error)
            else:
                for identity in due:
                    del self._dead[identity]
            await asyncio.sleep(LOOK_SECONDS)

    def refuse_starts(self, interrupt: bool) -> None:
        """Start nothing more; `interrupt` a start that waits for the fork server, which may import for ten seconds."""
        self._stopping = True
        for server in _fork_servers() if interrupt else ():
            server.kill()

    def spec(self, identity: ReplicaId, slot: int) -> ReplicaSpec:
        """Gather all that a replica's process needs: its devices, threads, endpoints and environment.

        Args:
            slot: which of its stage's GPUs it takes (`config.devices.slot_devices`).
        """
        stage = self._pipeline.stage(identity.stage)
        devices = host_devices()
        placed = slot_devices(stage, slot, devices)
        sharing = max(1, sum(self._pipeline.stage(name).kind in MODEL_KINDS for name, _ in self._here))
        inbox = self._run_directory.endpoint(f"{identity.stage}-{identity.replica}")
        environment = {name: str(value) for name, value in stage.environment.items()}
        visible, environment = self.mps.apply(visible_devices(placed), environment, stage.multiprocessors)
        return ReplicaSpec(
            pipeline_json=msgspec.json.encode(self._pipeline),
            stage=identity.stage,
            replica=identity.replica,
            epoch=identity.epoch,
            ordered=time.monotonic(),
            control_endpoint=self._control_endpoint,
            inbox_endpoint=inbox,
            remote_endpoint=f"tcp://{self._address}:0" if spans_hosts(self._pipeline) else "",
            devices=tuple(visible),
            threads=threads_of(stage, bool(placed), sharing, os.cpu_count() or 1),
            launcher_pid=os.getpid(),
            log_file=str(self._run_directory.log_file(identity.name)),
            run_dir=str(self._run_directory.path),
            run_dir_is_temporary=self._run_directory.temporary,
            environment=tuple(environment.items()),
        )

    def _ended(self, identity: ReplicaId) -> None:
        process = self._processes.pop(identity)
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.sentinel)
        self._dead[identity] = loop.time()
        process.join()
        left = self._started.pop(identity, None)
        if process.exitcode == SERVER_LOST and left is not None:
            with contextlib.suppress(psutil.NoSuchProcess):  # what hangs does not obey the kernel's SIGTERM
                left.kill()
        if not self._processes:
            self._none_left.set()
        if process.exitcode and not self._stopping:
            self._run_directory.keep = True
        self.on_exit(identity, describe_exit(process.exitcode), process.exitcode)

    def log_tail(self, identity: ReplicaId) -> str:
        """Return the last lines of a replica's log."""
        path = self._run_directory.log_file(identity.name)
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error.strerror})"
        return "\n".join(lines[-TAIL_LINES:])

    async def stop(self, timeout: float) -> None:
        """Send SIGTERM to all, and SIGKILL to those that remain after `timeout` seconds. Returns when none is left.

        The fork server ends last: one that is stopped neither ends by itself nor says that its stages have ended.
        """
        for process in self._processes.values():
            process.terminate()
        await at_most(timeout, self._none_left.wait())
        for identity, process in self._processes.items():
            logger.warning("%s did not stop; killing it", identity.name)
            process.kill()
        await at_most(KILL_SECONDS, self._none_left.wait())
        self.refuse_starts(interrupt=True)
        await at_most(KILL_SECONDS, self._none_left.wait())
        if self._looking is not None and self._ledger is not None:
            await end_tasks(self._looking)
            self._ledger.close()

    def kill_replica(self, identity: ReplicaId) -> None:
        """Send SIGKILL to one replica; its end is reported like any other."""
        process = self._processes.get(identity)
        if process is not None:
            process.kill()

    def kill(self) -> None:
        """Send SIGKILL to all, now."""
        for process in self._processes.values():
            process.kill()
