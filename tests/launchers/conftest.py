"""The launchers of launch/ with commands of a cluster (ssh, srun, scontrol) that stay on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Leaves the options and the host away, as sshd's side would see it. Its standard input is the launcher's, as ssh's is.
SSH = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift 2; done
echo "$1" >> "$STUBS/hosts"
shift
exec bash -c "$*"
"""
SRUN = """#!/usr/bin/env bash
echo "$*" >> "$STUBS/srun"
while [[ $1 == -* ]]; do shift; done
pids=()
for ((rank = 0; rank < SLURM_NNODES; rank++)); do
    SLURM_NODEID=$rank "$@" &
    pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2> /dev/null; stopped=1' TERM
code=0
wait -n || { code=$?; kill -TERM "${pids[@]}" 2> /dev/null; }
[[ -z ${stopped:-} ]] || code=0
for pid in "${pids[@]}"; do wait "$pid" || true; done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
[[ "$1 $2" == "show hostnames" ]] && printf '127.0.0.2\\n127.0.0.3\\n'
"""


class Started:
    """A launcher script in a process group of its own; all that it writes is in `output`."""

    def __init__(self, folder: Path, script: str, *arguments: str, **environment: str) -> None:
        self._output = folder / "output"
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
                    "PATH": f"{folder}:{os.environ['PATH']}",
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
        deadline = time.monotonic() + seconds
        while self.output.count(text) < count:
            assert time.monotonic() < deadline, f"waited in vain for {count} x {text!r}:\n{self.output}"
            assert self.process.poll() is None, self.output
            time.sleep(0.02)

    def end(self, number: signal.Signals | None = None, seconds: float = 10.0) -> int:
        """The exit code, after a signal to all processes of the terminal if one is given."""
        if number is not None:
            os.killpg(self.process.pid, number)
        return self.process.wait(seconds)

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
        deadline = time.monotonic() + seconds
        while left := self.members():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.02)


@pytest.fixture
def start(short_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts launchers with `ssh`, `srun` and `scontrol` of this machine; nothing of them may be left at the end."""
    for name, text in (("ssh", SSH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (short_path / name).write_text(text)
        (short_path / name).chmod(0o755)
    started: list[Started] = []

    def begin(script: str, *arguments: str, **environment: str) -> Started:
        started.append(Started(short_path, script, *arguments, **environment))
        return started[-1]

    try:
        yield begin
        for launcher in started:
            if launcher.process.poll() is None:
                launcher.end(signal.SIGTERM)
            launcher.assert_nothing_left()
    finally:
        for launcher in started:
            for pid in launcher.members():
                os.kill(pid, signal.SIGKILL)
            launcher.process.wait()
