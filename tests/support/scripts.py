"""Runs the scripts of launch/ with commands of a cluster (ssh, srun, scontrol) that stay on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.paths import REPOSITORY
from tests.support.waiting import PATIENCE

STUBS = REPOSITORY / "tests" / "launchers" / "stubs"


class Started:
    """A launcher script in a separate process group; all that it writes is in `output`."""

    def __init__(self, folder: Path, script: str, *arguments: str, **environment: str) -> None:
        self._output = folder / f"output-{len(list(folder.glob('output-*')))}"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [str(REPOSITORY / "launch" / script), *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "PATH": f"{STUBS}:{os.environ['PATH']}",
                    "PYTHON": sys.executable,
                    "STUBS": str(folder),
                    "TMPDIR": str(folder),
                    "OMNI_PYTHON": sys.executable,
                    **environment,
                },
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def until(self, text: str, count: int = 1, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds * PATIENCE
        while self.output.count(text) < count:
            assert time.monotonic() < deadline, f"waited in vain for {count} x {text!r}:\n{self.output}"
            assert self.process.poll() is None, self.output
            time.sleep(0.02)

    def end(self, number: signal.Signals | None = None, seconds: float = 10.0) -> int:
        """The exit code, after a signal to all processes of the terminal if one is given."""
        if number is not None:
            os.killpg(self.process.pid, number)
        return self.process.wait(seconds * PATIENCE)

    def members(self) -> dict[int, str]:
        """Living processes of its session, those of remote commands included: pid -> command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:  # it has just ended
                    continue
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found[int(entry.name)] = command
        return found

    def assert_nothing_left(self, seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds * PATIENCE
        while left := self.members():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.02)
