"""Offline inference: `OmniLLM("stage_configs/....yaml").generate(prompts)` starts a pipeline and answers prompts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from omni_actors.client import AsyncOmniClient, OmniClient, Prompting, RequestStream
from omni_actors.client.outputs import OmniRequestOutput
from omni_actors.errors import ConfigError, OmniError, Overloaded, RequestTimeout, StartupError
from omni_actors.protocol.payloads import StageParams
from omni_actors.run_directory import short_temporary_folder

STOP_SECONDS = 15.0
POLL_SECONDS = 0.1


class OmniLLM:
    """Runs a pipeline for as long as this object lives. Use it as a context manager.

    The pipeline runs as `python -m omni_actors.launch` in a separate process, so that a script needs no
    `if __name__ == "__main__"` guard, and a crash of either does not take down the other.

    Args:
        config: the pipeline's YAML.
        overrides: values by dotted key, for instance `{"stages.thinker.engine.max_num_seqs": 8}`.
        startup_timeout: seconds until all stages must be ready.

    Raises:
        StartupError, ConfigError: the pipeline did not start; with the launcher's output.
    """

    def __init__(
        self, config: str | Path, overrides: Mapping[str, Any] | None = None, startup_timeout: float = 600.0
    ) -> None:
        self._run_dir = tempfile.mkdtemp(prefix="omni-llm-", dir=short_temporary_folder())
        self._log = open(Path(self._run_dir) / "launcher.log", "w+b")  # noqa: SIM115 - closed in close()
        command = [sys.executable, "-m", "omni_actors.launch", str(config), "--run-dir", self._run_dir]
        for key, value in (overrides or {}).items():
            command += ["--set", f"{key}={value}"]
        # In a new session: Ctrl-C in the script must reach the launcher through close(), and not directly.
        self._launcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self._client: OmniClient | None = None
        try:
            self._client = self._connect(startup_timeout)
        except BaseException:
            self.close()
            raise

    def _connect(self, timeout: float) -> OmniClient:
        deadline = time.monotonic() + timeout
        client = OmniClient(self.endpoint)
        try:
            while True:
                if self._launcher.poll() is not None:
                    raise self._start_failure()
                if time.monotonic() > deadline:
                    raise StartupError(f"The pipeline was not ready within {timeout:g} s.\n{self._log_text()}")
                with contextlib.suppress(RequestTimeout):
                    if client.describe(timeout=1.0).healthy:
                        return client
                time.sleep(POLL_SECONDS)
        except BaseException:
            client.close()
            raise

    def _start_failure(self) -> OmniError:
        text = self._log_text()
        kind = ConfigError if self._launcher.returncode == 2 else StartupError
        return kind(f"The launcher ended with exit code {self._launcher.returncode}:\n{text}", hint="")

    def _log_text(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()

    @property
    def endpoint(self) -> str:
        """Where other clients may connect while this pipeline lives."""
        return f"ipc://{self._run_dir}/client"

    @property
    def client(self) -> OmniClient:
        """The connection to the pipeline, for streaming."""
        if self._client is None:
            raise StartupError("This OmniLLM is closed.", hint="Make a new one.")
        return self._client

    def generate(
        self,
        prompts: Prompting | Sequence[Prompting],
        sampling_params: Mapping[str, StageParams | Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[OmniRequestOutput]:
        """Answer all prompts at once: the stages work on different prompts at the same time.

        Args:
            prompts: one or more prompts, as for `AsyncOmniClient.submit`; a list of chat messages is one prompt.
            sampling_params: parameters by stage name, for all prompts.
            options: modalities, voice, seed, timeout, as for `AsyncOmniClient.submit`.

        Returns:
            One output per prompt, in order. A prompt that failed has its `error` set; the others are complete.
        """
        many, params = as_prompts(prompts), sampling_params or {}
        return self.client.run(lambda client: _generate_all(client, many, params, options))

    def close(self) -> None:
        """Stop the pipeline and remove its files. Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._launcher.poll() is None:
            self._launcher.terminate()
            try:
                self._launcher.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._launcher.kill()  # its children notice and end by themselves
                self._launcher.wait()
        self._log.close()
        if os.path.isdir(self._run_dir):
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def __enter__(self) -> OmniLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


async def _generate_all(
    client: AsyncOmniClient, prompts: Sequence[Prompting], params: Mapping[str, Any], options: Mapping[str, Any]
) -> list[OmniRequestOutput]:
    # Prompts beyond what the coordinator admits at once wait here.
    slots = asyncio.Semaphore((await client.describe()).max_in_flight)

    async def answer(prompt: Prompting) -> OmniRequestOutput:
        stream: RequestStream | None = None
        try:
            while True:
                try:
                    async with slots:
                        stream = await client.submit(prompt, params=params, **options)
                        return await stream.result()
                except Overloaded as error:  # another client of this pipeline has requests, too
                    await asyncio.sleep(error.retry_after or POLL_SECONDS)
        except OmniError as error:
            return OmniRequestOutput(stream.request_id if stream is not None else "", error=error)

    return list(await asyncio.gather(*(answer(prompt) for prompt in prompts)))


def as_prompts(prompts: Prompting | Sequence[Prompting]) -> list[Prompting]:
    """Return a single prompt as a list of one. A list of messages (mappings with a role) is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(item, Mapping) and "role" in item for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
