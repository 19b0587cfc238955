"""Runs the scripts of launch/ with commands of a cluster (ssh, srun, scontrol) that stay on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.paths import REPOSITORY
from tests.support.waiting import PATIENCE, until

STUBS = REPOSITORY / "tests" / "launchers" / "stubs"


class Started:
    """A launcher script in a separate process group; all that it writes is in `output`."""

    def __init__(self, folder: Path, script: str, *arguments: str, **environment: str) -> None:
        self._output = folder / f"output-{len(list(folder.glob('output-*')))}"
        own = {"PATH": f"{STUBS}:{os.environ['PATH']}", "STUBS": str(folder), "TMPDIR": str(folder)}
        own |= dict.fromkeys(("PYTHON", "OMNI_PYTHON"), sys.executable)
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [str(REPOSITORY / "launch" / script), *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **own, **environment},
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def until(self, text: str, count: int = 1, seconds: float = 20.0) -> None:
        def said() -> bool:
            ended, shown = self.process.poll() is not None, self.output
            assert not ended or shown.count(text) >= count, shown
            return shown.count(text) >= count

        until(said, seconds, lambda: f"{count} x {text!r}:\n{self.output}")

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
        until(lambda: not self.members(), seconds, lambda: f"the end of {self.members()}")
