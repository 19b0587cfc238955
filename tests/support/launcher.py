"""Launchers with echo engines, in separate processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from omni_actors.client import OmniClient
from omni_actors.protocol.messages import Description
from tests.support.paths import REPOSITORY, import_path
from tests.support.processes import assert_nothing_left, end_all, processes_of, shared_memory_of
from tests.support.waiting import PATIENCE, until

READY = re.compile(r"ready after .* clients connect to (\S+)")


def held(description: Description) -> dict[str, int]:
    """Counts of what the stages hold, by name; zeros are left out."""
    counts = {
        f"{stage.stage}/{stage.replica} {name}": count
        for stage in description.stages
        if stage.state == "ready"
        for name, count in {**stage.counts, "in_flight": stage.in_flight}.items()
        if count and not name.startswith(("dropped_", "rejected_", "total_"))
    }
    requests = {"in_flight": description.in_flight, "queued": description.queued}
    return counts | {name: count for name, count in requests.items() if count}


class EchoLauncher:
    """`python -m omni_actors.launch` on `data`, everything of it in `folder`."""

    def __init__(
        self,
        folder: Path,
        data: Any,
        *arguments: str,
        program: Sequence[str] = ("-m", "omni_actors.launch"),
        path: str = "",
        within: Callable[..., list[str]] = lambda *command: [*command],
    ) -> None:
        """`within` makes the command line of one that runs elsewhere, as on a host of its own."""
        self.folder = folder
        number = len(list(folder.glob("*.yaml")))
        config = folder / f"{number}.yaml"
        config.write_text(yaml.safe_dump(data, sort_keys=False))
        self._output = folder / f"{number}.out"
        command = within(sys.executable, *program, str(config), *arguments)
        # TMPDIR: a run directory that is not given lies in the folder as well.
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": import_path(path)},
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_ready(self, seconds: float = 30.0) -> EchoLauncher:
        def ready() -> re.Match[str] | None:
            assert self.process.poll() is None, self.output
            return READY.search(self.output)

        self.endpoint = until(ready, seconds, "ready")[1]
        return self

    def describe(self) -> Description:
        with OmniClient(self.endpoint) as client:
            return client.describe()

    def describe_with(self, keys: Path) -> Description:
        with OmniClient(self.endpoint, keys=keys) as client:
            return client.describe()

    def pid_of(self, stage: str) -> int:
        return next(status.pid for status in self.describe().stages if status.stage == stage)

    def wait_idle(self, seconds: float = 5.0) -> None:
        with OmniClient(self.endpoint) as client:
            deadline = time.monotonic() + seconds * PATIENCE
            while left := held(client.describe()):
                assert time.monotonic() < deadline, f"still held: {left}"
                time.sleep(0.05)

    def wait_end(self, seconds: float = 10.0) -> int:
        """The launcher's exit code."""
        return self.process.wait(seconds * PATIENCE)

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = 10.0) -> int:
        self.process.send_signal(number)
        return self.wait_end(seconds)


@contextmanager
def launched(data: Any, loses_stages: bool = False) -> Iterator[EchoLauncher]:
    """A pipeline that is ready, in a folder of its own; it ends in order and leaves nothing but logs of lost stages."""
    with tempfile.TemporaryDirectory(prefix="ot-", dir="/tmp") as name:
        folder = Path(name)
        try:
            launcher = EchoLauncher(folder, data).wait_ready()
            yield launcher
            shared = shared_memory_of(processes_of(folder))
            assert launcher.end() == 0
            assert_nothing_left(folder, 2.0, shared)
            left = [path.name for path in folder.rglob("*") if path.is_dir()]
            assert left[1:] in ([], ["logs"]) if loses_stages else not left
        finally:
            end_all(folder)
