"""Keeps a coordinator running: a child of the launcher, started again on the same endpoints when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable

import msgspec

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.process import Answer, CoordinatorSpec, Ended, Listening
from omni_actors.errors import OmniError, StartupError
from omni_actors.logs import get_logger
from omni_actors.processes import EXIT_OK, Backoff, describe_exit
from omni_actors.protocol.common import Failed
from omni_actors.run_directory import RunDirectory

logger = get_logger(__name__)

START_SECONDS = 20.0  # until it has bound its sockets
SPEECHLESS_SECONDS = 5.0  # after which a coordinator that listens must have spoken
STOP_SECONDS = 3.0  # beyond the time for requests in flight
FIRST_BACKOFF, LAST_BACKOFF = 0.5, 10.0


class CoordinatorChild:
    """Owns the coordinator's process.

    Args:
        control: where the coordinator listens for stages and nodes.
        results: where it takes the stages' answers.
        on_end: called with "" once it has ended in order, else with why the launch failed or cannot go on.
        on_restart: called with a sentence when it has died and is started again.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        run_directory: RunDirectory,
        control: str,
        results: str,
        on_end: Callable[[str], None],
        on_restart: Callable[[str], None],
    ) -> None:
        self._pipeline = pipeline
        listen = pipeline.coordinator.listen
        self._spec = CoordinatorSpec(
            pipeline=pipeline,
            client=run_directory.endpoint("client") if listen == "ipc" else listen,
            control=control,
            results=results,
            launcher_pid=os.getpid(),
            run_dir=str(run_directory.path),
            run_dir_is_temporary=run_directory.temporary,
            began=time.monotonic(),
        )
        self._on_end = on_end
        self._on_restart = on_restart
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        settings = pipeline.coordinator
        self._backoff = Backoff(FIRST_BACKOFF, LAST_BACKOFF, settings.restarts, settings.restart_window)
        self._listens_since = 0.0

    @property
    def client_endpoint(self) -> str:
        return self._spec.client

    async def start(self) -> None:
        """Start the coordinator; returns once it listens.

        Raises:
            OmniError: it cannot, for the reason that it gave.
        """
        await self._spawn()
        self._keeping = asyncio.create_task(self._keep(), name="keeper")

    async def _spawn(self) -> None:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "omni_actors.coordinator.process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        if process.stdin is None or process.stdout is None:
            raise StartupError("The coordinator's process has no pipes.")
        with contextlib.suppress(ConnectionError):  # it has just died; its silence tells
            process.stdin.write(msgspec.json.encode(self._spec))
            await process.stdin.drain()
            process.stdin.close()
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
        except TimeoutError:
            self.kill()
            raise StartupError(f"The coordinator did not listen within {START_SECONDS:g} s.") from None
        if not line:
            code = await process.wait()
            raise StartupError(f"The coordinator died at its start ({describe_exit(code)}).", hint="Its log is above.")
        answer: Answer = msgspec.json.decode(line, type=Answer)
        if not isinstance(answer, Listening):
            await process.wait()
            raise answer.to_error() if isinstance(answer, Failed) else StartupError("The coordinator has ended.")
        # The next one must be found where this one was.
        self._listens_since = time.monotonic()
        self._spec = msgspec.structs.replace(self._spec, client=answer.client, control=answer.control)

    async def _keep(self) -> None:
        while self._process is not None:
            code = await self._process.wait()
            if self._stopping.is_set() or code == EXIT_OK:
                self._on_end(await self._last_words())
                return
            how = describe_exit(code)
            delay = self._backoff.next(time.monotonic())
            if delay is None:
                self._on_end(f"The coordinator died ({how}), after {self._backoff.restarts} restarts.")
                return
            self._on_restart(f"the coordinator died ({how}) and is started again; requests in flight are lost")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            if self._stopping.is_set():
                continue
            try:
                await self._spawn()
            except (OSError, OmniError) as error:
                logger.error("the coordinator cannot be started: %s", error)

    async def _last_words(self) -> str:
        """Why the launch failed, for a launcher that the coordinator could not tell otherwise; "" if it did not."""
        stdout = self._process.stdout if self._process is not None else None
        line = await stdout.read() if stdout is not None else b""
        answer: Answer | None = msgspec.json.decode(line, type=Answer) if line else None
        return answer.failure if isinstance(answer, Ended) else ""

    async def stop(self) -> None:
        """SIGTERM: requests get their time to end, clients their answers. SIGKILL if it takes too long. Idempotent."""
        self._stopping.set()
        if self._keeping is None:
            self.kill()
            return
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        patience = self._pipeline.coordinator.drain_timeout + STOP_SECONDS
        done, _ = await asyncio.wait({self._keeping}, timeout=patience)
        if not done:
            logger.error("the coordinator did not stop; killing it")
            self.kill()
            await asyncio.wait({self._keeping}, timeout=STOP_SECONDS)

    def kill_silent(self) -> None:
        """SIGKILL to a coordinator that says nothing although it has listened for long: the next one will speak."""
        lives = self._process is not None and self._process.returncode is None
        if lives and time.monotonic() > self._listens_since + SPEECHLESS_SECONDS:
            logger.error("the coordinator says nothing; killing it")
            self._listens_since = time.monotonic()
            self.kill()

    def kill(self) -> None:
        """SIGKILL, now."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
