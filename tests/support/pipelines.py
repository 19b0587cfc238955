"""Starts pipelines for tests the way users do: `python -m omni_actors.launch` in a separate process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from omni_actors.client import OmniClient
from omni_actors.errors import OmniError
from tests.support.launcher import held
from tests.support.paths import REPOSITORY
from tests.support.waiting import PATIENCE

RUN_DIRECTORIES: list[Path] = []  # of this session of tests, with the logs of its pipelines


def remove_run_directories() -> None:
    """Remove the logs of all pipelines: nothing has failed that they could explain."""
    while RUN_DIRECTORIES:
        shutil.rmtree(RUN_DIRECTORIES.pop())


class RunningPipeline:
    """A launcher process with its run directory; a context manager."""

    def __init__(
        self,
        config: str | Path,
        overrides: Mapping[str, object] | None = None,
        timeout: float = 600.0,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="omni-test-"))
        RUN_DIRECTORIES.append(self.run_dir)
        self.endpoint = f"ipc://{self.run_dir}/client"
        command = [sys.executable, "-m", "omni_actors.launch", str(config), "--run-dir", str(self.run_dir)]
        for key, value in (overrides or {}).items():
            command += ["--set", f"{key}={value}"]
        command += arguments
        self.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._wait_ready(timeout)

    def _wait_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with OmniClient(self.endpoint) as client:
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the launcher ended: {self.process.communicate()[0]}")
                try:
                    if client.describe(timeout=1.0).healthy:
                        return
                except OmniError:
                    continue
                time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"not ready after {timeout} s")

    def assert_idle(self, timeout: float = 10.0) -> None:
        """All counts of all stages return to zero."""
        deadline = time.monotonic() + timeout * PATIENCE
        with OmniClient(self.endpoint) as client:
            while left := held(client.describe(timeout=10 * PATIENCE)):
                assert time.monotonic() < deadline, f"still held: {left}"
                time.sleep(0.1)

    def stop(self) -> str:
        """SIGTERM, wait, and return what the launcher printed."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.communicate(timeout=15 * PATIENCE)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def __enter__(self) -> RunningPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
