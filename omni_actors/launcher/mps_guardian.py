"""Runs a private CUDA MPS daemon and ends it, with all that it started, when the launcher is gone.

The launcher starts `python -m omni_actors.launcher.mps_guardian SPEC` and keeps the other end of its standard input,
which the system closes however the launcher ends. The answer is one line of JSON: whether the daemon accepts clients.

The daemon's server is a separate process that survives its daemon, and a server that hangs also keeps the daemon from
quitting. So the daemon is asked first, and what is left after a moment is killed: this process adopts every orphan of
its descendants, and therefore finds them all.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from omni_actors.host.processes import EXIT_FAILED, EXIT_OK, adopt_orphans, describe_exit, die_with_parent
from omni_actors.host.run_directory import clear_abandoned

READY_SECONDS = 20.0  # for the daemon and its first server
ANSWER_SECONDS = 5.0  # for one command to the daemon, or to nvidia-smi
CLIENTS_SECONDS = 3  # for clients to leave at the end; the stages of a killed launcher need a moment
KILL_SECONDS = 2.0
POLL_SECONDS = 0.1
WATCH_SECONDS = 1.0
SERVER_READY = re.compile(r"NEW SERVER \d+: Ready")
CHATTER = re.compile(r"Accepting connection|NEW UI|UI closed|Cmd:|Removed Shm file")  # in the daemon's log


class Refused(Exception):
    """MPS cannot be used here; the text says why."""


class GuardianSpec(msgspec.Struct):
    """What the guardian gets from its launcher."""

    control: str  # path of nvidia-cuda-mps-control
    folder: str  # for the daemon's pipes; made here, removed at the end
    devices: tuple[str, ...]  # GPUs as CUDA_VISIBLE_DEVICES names them for this host
    log_file: str
    run_dir: str
    run_dir_is_temporary: bool


class GuardianAnswer(msgspec.Struct):
    """Whether clients can connect to the daemon."""

    uuids: dict[str, str] = {}  # a GPU of `devices` -> its UUID, by which daemon and clients must name it
    refused: str = ""  # why there is no daemon


def main() -> int:
    """Start the daemon, answer, wait for the launcher's end, leave nothing; returns the exit code."""
    spec = msgspec.json.decode(sys.argv[1], type=GuardianSpec)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # only the launcher's end counts; unlike SIG_IGN, this is not inherited
    adopt_orphans()
    daemon = Daemon(spec)
    try:
        answer = daemon.start()
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
        if answer.refused:
            return EXIT_FAILED
        return EXIT_OK if daemon.wait_for_launcher() else EXIT_FAILED
    except BrokenPipeError:  # the launcher was killed meanwhile
        return EXIT_OK
    finally:
        daemon.end()
        clear_abandoned(Path(spec.run_dir), spec.run_dir_is_temporary)


class Daemon:
    """The control daemon in the foreground, as a child of this process."""

    def __init__(self, spec: GuardianSpec) -> None:
        self._spec = spec
        self._folder = Path(spec.folder)
        self._log = Path(spec.log_file)
        # The daemon finds its server through PATH, in the folder of one or the other.
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(spec.control).parent), "/usr/sbin"])
        self._environment = {
            **os.environ,
            "PATH": path,
            "CUDA_MPS_PIPE_DIRECTORY": spec.folder,
            "CUDA_MPS_LOG_DIRECTORY": spec.folder,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> GuardianAnswer:
        """Start the daemon and its server, and wait until that accepts clients."""
        try:
            uuids = gpu_uuids(self._spec.devices, self._environment)
            self._environment["CUDA_VISIBLE_DEVICES"] = ",".join(uuids.values())
            self._folder.mkdir(mode=0o700)
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [self._spec.control, "-f"],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=die_with_parent,
                )
            self._start_server(self._process)
        except (OSError, subprocess.TimeoutExpired, Refused) as error:
            return GuardianAnswer(refused=str(error))
        return GuardianAnswer(uuids=uuids)

    def _start_server(self, daemon: subprocess.Popen[bytes]) -> None:
        """Start a server now: one that cannot start would otherwise show only as failures of its clients."""
        deadline = time.monotonic() + READY_SECONDS
        asked = False
        while not SERVER_READY.search(self._log_text()):
            if daemon.poll() is not None:
                raise Refused(f"the daemon ended ({describe_exit(daemon.returncode)}){self._last_line()}")
            if time.monotonic() > deadline:
                raise Refused(f"its server was not ready within {READY_SECONDS:g} s{self._last_line()}")
            if not asked:
                asked = self._ask(f"start_server -uid {os.getuid()}") is not None  # `None`: it does not listen yet
            elif not (servers := (self._ask("get_server_list") or "").split()):
                raise Refused(f"its server ended{self._last_line()}")
            elif any("ACTIVE" in (self._ask(f"get_server_status {pid}") or "") for pid in servers):
                return
            if launcher_is_gone(POLL_SECONDS):
                raise Refused("the launcher has ended")

    def _ask(self, command: str, seconds: float = ANSWER_SECONDS) -> str | None:
        """Send the daemon a command and return its answer; `None` if it cannot be reached."""
        done = subprocess.run(
            [self._spec.control],
            env=self._environment,
            input=f"{command}\n",
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return done.stdout if done.returncode == 0 else None

    def _log_text(self) -> str:
        return self._log.read_text(errors="replace")

    def _last_line(self) -> str:
        """Return what the server, or else the daemon, said last, to follow a phrase."""
        server_log = self._folder / "server.log"
        said = server_log.read_text(errors="replace").splitlines() if server_log.exists() else []
        said = said or [line for line in self._log_text().splitlines() if not CHATTER.search(line)]
        return f": {said[-1]}" if said else ""

    def wait_for_launcher(self) -> bool:
        """Wait until standard input closes; false if the daemon ends before that."""
        while self._process is not None and self._process.poll() is None:
            if launcher_is_gone(WATCH_SECONDS):
                return True
        return False

    def end(self) -> None:
        """Let clients and daemon end, kill what is left, and remove the folder."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ask(f"quit -t {CLIENTS_SECONDS}", CLIENTS_SECONDS + KILL_SECONDS)
        left = psutil.Process().children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, KILL_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)


def launcher_is_gone(seconds: float) -> bool:
    """Whether standard input closes within this time."""
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(ready) and not os.read(0, 4096)


def gpu_uuids(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Map GPUs, as CUDA_VISIBLE_DEVICES names them, to their UUIDs.

    A number would be applied twice: by the daemon to all GPUs and by its clients to the daemon's GPUs.

    Raises:
        Refused: nvidia-smi does not know a GPU.
        OSError, subprocess.TimeoutExpired: nvidia-smi cannot be run.
    """
    if not any(name.isdigit() for name in names):
        return {name: name for name in names}
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=ANSWER_SECONDS,
        check=False,
    )
    known = dict(line.split(", ", 1) for line in done.stdout.splitlines() if ", " in line)
    missing = [name for name in names if name.isdigit() and name not in known]
    if missing:
        raise Refused(f"nvidia-smi names no GPU {missing[0]}: {(done.stdout + done.stderr).strip()}")
    return {name: known[name] if name.isdigit() else name for name in names}


if __name__ == "__main__":
    sys.exit(main())
