"""The coordinator and the HTTP server as child processes of the launcher, which restarts them on the same endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from omni_actors.config import PipelineConfig
from omni_actors.coordinator import Answer, CoordinatorSpec, Finished, Listening
from omni_actors.errors import OmniError, StartupError, counted
from omni_actors.host.processes import EXIT_OK, Backoff, at_most, describe_exit, end_tasks, until_done
from omni_actors.host.run_directory import RunDirectory
from omni_actors.http_server.settings import SPEC_FLAG, HttpServerSpec, ServerSettings
from omni_actors.launcher.preflight import pip_install
from omni_actors.logs import get_logger, say
from omni_actors.protocol.messages import Failed

logger = get_logger(__name__)

HTTP_FIRST_BACKOFF, HTTP_LAST_BACKOFF = 0.5, 30.0
IMPORT_ERRORS = ("ModuleNotFoundError", "ImportError")
LAST = "Application startup failed. Exiting."  # uvicorn's, below the reason


def last_words(log: str) -> str:
    """The line of a log of the HTTP server that says why it ended, with what to install if a module is missing."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.endswith(LAST)]
    last = lines[-1] if lines else "its log is empty"
    return f"{last}. Run {pip_install('http')}." if last.startswith(IMPORT_ERRORS) else last


class HttpChild:
    """A process of the HTTP server. Owns its listening socket, so that clients can connect during a restart.

    Args:
        on_failure: called with the reason when the first process ends by itself before it can have served: the next one
            would, too.
    """

    def __init__(
        self, listener: socket.socket, settings: ServerSettings, log_file: Path, on_failure: Callable[[str], None]
    ) -> None:
        self._on_failure = on_failure
        self._listener = listener
        self._log_file = log_file
        # Others may read a command line; the keys are inherited with the environment.
        public = msgspec.structs.replace(settings, api_key=None)
        spec = msgspec.json.encode(HttpServerSpec(public, self._listener.fileno(), os.getpid(), str(log_file)))
        self._command = [sys.executable, "-m", "omni_actors.http_server", SPEC_FLAG, spec.decode()]
        self._backoff = Backoff(HTTP_FIRST_BACKOFF, HTTP_LAST_BACKOFF)
        self._process: asyncio.subprocess.Process | None = None
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process and keep it running. Connections wait in the socket's queue until it serves."""
        self._process = await self._spawn()
        self._restarting = asyncio.create_task(self._restart(self._process), name="http process")

    async def _spawn(self) -> asyncio.subprocess.Process:
        log = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return await asyncio.create_subprocess_exec(
                *self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[self._listener.fileno()]
            )
        finally:
            os.close(log)

    async def _restart(self, process: asyncio.subprocess.Process) -> None:
        clock = asyncio.get_running_loop().time
        first = True
        while True:
            began = clock()
            code = await self._ended(process)
            how = describe_exit(code)
            if first and code > 0 and clock() - began < HTTP_LAST_BACKOFF:
                log = self._log_file.read_text(errors="replace")
                self._on_failure(f"The HTTP server ended while it started ({how}): {last_words(log)}")
                return
            first = False
            if clock() - began > HTTP_LAST_BACKOFF:
                self._backoff.reset()
            delay = self._backoff.next(clock()) or 0.0
            logger.error("the HTTP server ended (%s); restart in %.1f s; log: %s", how, delay, self._log_file)
            await asyncio.sleep(delay)
            try:
                process = self._process = await self._spawn()
            except OSError as error:  # out of memory or processes: try again later
                logger.error("cannot start the HTTP server: %s", error)

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        """Wait for the end of a process; until then uvicorn turns ten times a second."""
        ended = asyncio.ensure_future(process.wait())
        await until_done(ended, lambda: [psutil.Process(process.pid)])
        return ended.result()

    async def stop(self, seconds: float) -> None:
        """Send SIGTERM, after `seconds` SIGKILL, and close the socket. Idempotent."""
        await end_tasks(self._restarting)
        self._restarting = None
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.terminate()
            await at_most(seconds, process.wait())
            if process.returncode is None:
                logger.warning("the HTTP server did not stop within %g s; killing it", seconds)
                process.kill()
                await process.wait()
        self._listener.close()


IDLE_SECONDS = 20.0  # of a starting process that uses no CPU: it is not just slow
START_SECONDS = 300.0  # until it listens, however slowly it starts
SILENT_SECONDS = 5.0  # a coordinator that has listened for this long must have answered the node agent
BUSY_SECONDS = 30.0  # the same for one that computes
TICK_SECONDS = 0.015  # of CPU: less is what its threads for sockets use
STOP_SECONDS = 3.0  # besides the time that it gives requests in flight
HEALTHY_SECONDS = 2.0  # after which a coordinator that listens has taken over its stages
FIRST_BACKOFF, LAST_BACKOFF = 0.5, 10.0


class CoordinatorChild:
    """Owns the coordinator's process.

    Args:
        on_end: called with "" after an orderly end, else with the reason why the launch failed or cannot go on.
        started: when the launcher's process started, on the monotonic clock; now if `None`.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        run_directory: RunDirectory,
        control: str,
        results: str,
        on_end: Callable[[str], None],
        started: float | None = None,
    ) -> None:
        settings = pipeline.coordinator
        self._spec = CoordinatorSpec(
            pipeline=pipeline,
            client=run_directory.endpoint("client") if settings.listen == "ipc" else settings.listen,
            control=control,
            results=results,
            launcher_pid=os.getpid(),
            run_dir=str(run_directory.path),
            run_dir_is_temporary=run_directory.temporary,
            began=time.monotonic(),
            started=time.monotonic() if started is None else started,
        )
        self._on_end = on_end
        self._stop_seconds = settings.drain_timeout + STOP_SECONDS
        self._backoff = Backoff(FIRST_BACKOFF, LAST_BACKOFF, settings.restarts, settings.restart_window)
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._listens_since = math.inf
        self._used = 0.0  # seconds of CPU when its silence was last noticed

    @property
    def client_endpoint(self) -> str:
        """Where clients connect; the same after every restart."""
        return self._spec.client

    async def start(self) -> None:
        """Start the coordinator and keep it running. Returns once it listens; raises the `OmniError` it failed with."""
        await self._spawn()
        self._watching = asyncio.create_task(self._watch(), name="coordinator process")

    async def _spawn(self) -> None:
        self._listens_since = math.inf  # while it starts it may be silent
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "omni_actors.coordinator.process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        if process.stdin is not None:
            process.stdin.write(msgspec.json.encode(self._spec))
            process.stdin.close()
        line = await self._first_line(process)
        if not line:
            how = describe_exit(await process.wait())
            raise StartupError(f"The coordinator died at its start ({how}).", hint="Its log is above.")
        answer: Answer = msgspec.json.decode(line, type=Answer)
        if not isinstance(answer, Listening):
            await process.wait()
            raise answer.to_error() if isinstance(answer, Failed) else StartupError("The coordinator has ended.")
        self._listens_since = time.monotonic()
        # A restarted coordinator must listen where this one does, also when the system chose the port.
        self._spec = msgspec.structs.replace(
            self._spec, client=answer.client, control=answer.control, generation=self._spec.generation + 1
        )

    async def _first_line(self, process: asyncio.subprocess.Process) -> bytes:
        """Wait for the first answer; empty if the process has ended. On a busy machine its imports take long."""
        began, used = time.monotonic(), 0.0
        while process.stdout is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SECONDS):
                    return await process.stdout.readline()
            before, (used, state) = used, _cpu_seconds(process.pid)
            waited = time.monotonic() - began
            if used > before and waited < START_SECONDS:
                continue
            await self._kill_and_wait()
            raise StartupError(
                f"The coordinator did not listen within {waited:.0f} s. Its process ({state}) has used {used:.1f} s of "
                f"CPU, of them {used - before:.1f} s in the last {IDLE_SECONDS:g} s. The load of this machine is "
                f"{os.getloadavg()[0]:.1f}, for {counted(len(os.sched_getaffinity(0)), 'core')}.",
                hint="With a load far above the number of cores, start again with less beside it. Otherwise see what "
                "holds the process: a signal that stopped it, a debugger, or a disk that does not answer.",
            )
        raise StartupError("The coordinator's process has no pipes.")

    async def _watch(self) -> None:
        """Restart the coordinator until it ends in order or has died too often."""
        refused = ""  # why the last one could not start
        while self._process is not None:
            code = await self._process.wait()
            if self._stopping.is_set() or code == EXIT_OK:
                self._on_end(await self._reported_failure())
                return
            how = describe_exit(code)
            if time.monotonic() > self._listens_since + HEALTHY_SECONDS:
                self._backoff.reset()  # losses of one that served are no reason to stop
            delay = self._backoff.next(time.monotonic())
            if delay is None:
                restarts = counted(self._backoff.restarts, "restart")
                self._on_end(f"The coordinator died ({how}), after {restarts}.{refused}")
                return
            say(f"the coordinator died ({how}) and is started again")
            await at_most(delay, self._stopping.wait())
            if self._stopping.is_set():
                continue
            try:
                await self._spawn()
                refused = ""
            except (OSError, OmniError) as error:
                refused = f" {error}"
                logger.error("cannot start the coordinator: %s", error)

    async def _reported_failure(self) -> str:
        """Read from an ended coordinator why the launch failed; "" if it did not."""
        stdout = self._process.stdout if self._process is not None else None
        line = await stdout.read() if stdout is not None else b""
        answer: Answer | None = msgspec.json.decode(line, type=Answer) if line else None
        return answer.failure if isinstance(answer, Finished) else ""

    async def stop(self) -> None:
        """Send SIGTERM and let requests in flight end; SIGKILL if that takes too long. Idempotent."""
        self._stopping.set()
        if self._watching is None:
            await self._kill_and_wait()
            return
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        done, _ = await asyncio.wait({self._watching}, timeout=self._stop_seconds)
        if not done:
            logger.error("the coordinator did not stop; killing it")
            self.kill()
            await asyncio.wait({self._watching}, timeout=STOP_SECONDS)

    def kill_if_silent(self, silent: float) -> None:
        """Kill a coordinator that has listened for a while but does not answer; it is then restarted.

        One that has used CPU since the last call may only have much to do on a busy machine, and has more time.

        Args:
            silent: seconds for which nothing was heard of it.
        """
        process = self._process
        if process is None or process.returncode is not None:
            return
        before, (self._used, state) = self._used, _cpu_seconds(process.pid)
        busy = self._used - before > TICK_SECONDS and silent < BUSY_SECONDS
        if not busy and time.monotonic() > self._listens_since + SILENT_SECONDS:
            logger.error("the coordinator (%s) has not answered for %.1f s; killing it", state, silent)
            self._listens_since = time.monotonic()
            self.kill()

    async def _kill_and_wait(self) -> None:
        """Kill the process and read its pipes to the end: asyncio complains of those that outlive the event loop."""
        self.kill()
        if self._process is not None:
            await at_most(STOP_SECONDS, self._process.communicate())  # the kernel ends none that waits for a disk

    def kill(self) -> None:
        """Send SIGKILL now."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def _cpu_seconds(pid: int) -> tuple[float, str]:
    """Seconds of CPU that a process has used, and its state."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return times.user + times.system, str(process.status())
    except psutil.NoSuchProcess:
        return 0.0, "gone"
