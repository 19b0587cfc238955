"""The HTTP server as a child process of the launcher, which owns its listening socket and restarts it when it dies."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from omni_actors.host.processes import Backoff, describe_exit
from omni_actors.http_server.settings import SPEC_FLAG, HttpServerSpec, ServerSettings, bind, url
from omni_actors.launcher.extras import pip_install
from omni_actors.logs import get_logger

logger = get_logger(__name__)

FIRST_BACKOFF, LAST_BACKOFF = 0.5, 30.0
IMPORT_ERRORS = ("ModuleNotFoundError", "ImportError")


class HttpChild:
    """Owns the listening socket, so that a taken port is an error at once and clients can connect during a restart.

    Args:
        address: `HOST:PORT`.
        settings: of the server.
        insecure: listen off loopback even without an API key.
        log_file: where the process writes its log.
        on_failure: called with the reason when the first process ends by itself before it can have served: the next one
            would, too.

    Raises:
        ConfigError: the address is wrong or taken, would be open to others without a key, or TLS cannot be used.
    """

    def __init__(
        self, address: str, settings: ServerSettings, insecure: bool, log_file: Path, on_failure: Callable[[str], None]
    ) -> None:
        self._on_failure = on_failure
        self._listener = bind(address, settings, insecure)
        self._log_file = log_file
        self.url = url(self._listener, settings)
        # Others may read a command line; the keys are inherited with the environment.
        public = msgspec.structs.replace(settings, api_key=None)
        spec = msgspec.json.encode(HttpServerSpec(public, self._listener.fileno(), os.getpid(), str(log_file)))
        self._command = [sys.executable, "-m", "omni_actors.http_server", SPEC_FLAG, spec.decode()]
        self._backoff = Backoff(FIRST_BACKOFF, LAST_BACKOFF)
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
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._listener.fileno()],
            )
        finally:
            os.close(log)

    async def _restart(self, process: asyncio.subprocess.Process) -> None:
        clock = asyncio.get_running_loop().time
        first = True
        while True:
            began = clock()
            code = await process.wait()
            how = describe_exit(code)
            if first and code > 0 and clock() - began < LAST_BACKOFF:
                self._on_failure(f"The HTTP server ended while it started ({how}): {self._last_line()}")
                return
            first = False
            if clock() - began > LAST_BACKOFF:
                self._backoff.reset()
            delay = self._backoff.next(clock()) or 0.0
            logger.error("the HTTP server ended (%s); restart in %.1f s; log: %s", how, delay, self._log_file)
            await asyncio.sleep(delay)
            try:
                process = self._process = await self._spawn()
            except OSError as error:  # out of memory or processes: try again later
                logger.error("cannot start the HTTP server: %s", error)

    def _last_line(self) -> str:
        """The end of the log, with what to install if a module is missing."""
        lines = self._log_file.read_text(errors="replace").splitlines()
        last = lines[-1].strip() if lines else "its log is empty"
        return f"{last}. Run {pip_install('http')}." if last.startswith(IMPORT_ERRORS) else last

    async def stop(self, seconds: float) -> None:
        """Send SIGTERM, after `seconds` SIGKILL, and close the socket. Idempotent."""
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
            self._restarting = None
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(seconds):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        self._listener.close()
