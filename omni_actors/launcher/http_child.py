"""The HTTP server as a child of the launcher: started with its listening socket, started again when it dies."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from omni_actors import envs
from omni_actors.config import HttpConfig
from omni_actors.http_server.settings import as_flags, check_certificate, check_exposure, listen, parse_address, url
from omni_actors.logs import get_logger

logger = get_logger(__name__)

FIRST_RESTART_SECONDS = 0.5
LAST_RESTART_SECONDS = 30.0
STOP_SECONDS = 5.0


class HttpChild:
    """Owns the listening socket, so that a taken port is an error at once and a restart refuses nobody.

    Args:
        address: `HOST:PORT`.
        insecure: listen off loopback even without an API key.
        endpoint: the coordinator's client endpoint.
        arguments: further arguments of `python -m omni_actors.http_server`.
        http: limits, TLS, foreign pages.
        log_file: where the process writes its log.

    Raises:
        ConfigError: the address is wrong or taken, or would be open to others without a key.
    """

    def __init__(
        self, address: str, insecure: bool, endpoint: str, arguments: Sequence[str], log_file: Path, http: HttpConfig
    ) -> None:
        host, port = parse_address(address)
        check_exposure(host, envs.api_key(), insecure)
        check_certificate(http)
        self._http = http
        self._listener = listen(host, port)
        self._endpoint = endpoint
        self._arguments = [*arguments, *as_flags(http), *(["--http-insecure"] if insecure else [])]
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None
        self._respawning: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return url(self._listener, self._http)

    async def start(self) -> None:
        """Start the process and keep one running. Connections wait in the socket's queue until it serves."""
        self._process = await self._spawn()
        self._respawning = asyncio.create_task(self._keep(), name="http process")

    async def _spawn(self) -> asyncio.subprocess.Process:
        descriptor = self._listener.fileno()
        log = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "omni_actors.http_server",
                "--endpoint",
                self._endpoint,
                "--listener",
                str(descriptor),
                "--launcher-pid",
                str(os.getpid()),
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[descriptor],
            )
        finally:
            os.close(log)

    async def _keep(self) -> None:
        pause = FIRST_RESTART_SECONDS
        clock = asyncio.get_running_loop().time
        while self._process is not None:
            began = clock()
            code = await self._process.wait()
            if clock() - began > LAST_RESTART_SECONDS:
                pause = FIRST_RESTART_SECONDS
            logger.error("the HTTP server ended (exit code %s); again in %.1f s; log: %s", code, pause, self._log_file)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_RESTART_SECONDS)
            try:
                self._process = await self._spawn()
            except OSError as error:  # no memory or no process to be had: try again later
                logger.error("the HTTP server cannot be started: %s", error)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL. Idempotent."""
        if self._respawning is not None:
            self._respawning.cancel()
            await asyncio.gather(self._respawning, return_exceptions=True)
            self._respawning = None
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()
        self._listener.close()
