"""Runs a private CUDA MPS daemon and ends it, with all that it started, when the launcher is gone.

`python -m omni_actors.launcher.mps_guardian CONTROL PIPES LOG RUN_DIR temporary|given`, with the daemon's environment.
The launcher holds the other end of standard input, which the system closes however the launcher ends. One line of
output says why clients cannot connect; it is empty if they can.
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
from pathlib import Path

import psutil

from omni_actors.host.processes import adopt_orphans, die_with_parent
from omni_actors.host.run_directory import clear_abandoned

READY_SECONDS = 20.0  # for the daemon and its first server
ASK_SECONDS = 5.0
CLIENTS_SECONDS = 3  # for clients to leave at the end; the stages of a killed launcher need a moment
READY = re.compile(r"NEW SERVER \d+: Ready")
CHATTER = re.compile(r"Accepting connection|NEW UI|UI closed|Cmd:|Removed Shm file")


def main(control: str, pipes: str, log: str, run_dir: str, kept: str) -> None:
    """Run the daemon until the launcher is gone or the daemon ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # only the launcher's end counts; unlike SIG_IGN, it is not inherited
    adopt_orphans()  # a server outlives its daemon, and keeps the daemon from quitting if it hangs
    try:
        Path(pipes).mkdir(mode=0o700)
        with Path(log).open("wb") as output:
            daemon = subprocess.Popen(
                [control, "-f"], stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=die_with_parent
            )
        refused = start_server(control, daemon, Path(log), Path(pipes) / "server.log")
        print(refused, flush=True)
        while not refused and daemon.poll() is None and not launcher_is_gone(1.0):
            pass
    except (OSError, subprocess.TimeoutExpired) as error:
        with contextlib.suppress(BrokenPipeError):  # the launcher was killed meanwhile
            print(error, flush=True)
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            ask(control, f"quit -t {CLIENTS_SECONDS}")
        left = psutil.Process().children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, 2.0)
        shutil.rmtree(pipes, ignore_errors=True)
        clear_abandoned(Path(run_dir), kept == "temporary")


def start_server(control: str, daemon: subprocess.Popen[bytes], log: Path, server_log: Path) -> str:
    """Start a server now, as one that cannot start would show only as failures of its clients; returns why, or ""."""
    deadline, asked = time.monotonic() + READY_SECONDS, False
    while daemon.poll() is None and time.monotonic() < deadline and not launcher_is_gone(0.1):
        if not asked:
            asked = ask(control, f"start_server -uid {os.getuid()}") is not None  # `None`: it does not listen yet
            continue
        servers = (ask(control, "get_server_list") or "").split()
        states = [ask(control, f"get_server_status {server}") or "" for server in servers]
        if READY.search(log.read_text(errors="replace")) or any("ACTIVE" in state for state in states):
            return ""
        if not servers:
            break
    said = "\n".join(path.read_text(errors="replace") for path in (log, server_log) if path.exists())
    last = [line for line in said.splitlines() if line and not CHATTER.search(line)][-1:]
    return f"{'its server' if asked else 'the daemon'} did not start: {last[0] if last else 'its log is empty'}"


def ask(control: str, command: str) -> str | None:
    """Send the daemon a command and return its answer; `None` if it cannot be reached."""
    text = f"{command}\n"
    done = subprocess.run([control], input=text, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    return done.stdout if done.returncode == 0 else None


def launcher_is_gone(seconds: float) -> bool:
    """Whether standard input closes within this time."""
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(ready) and not os.read(0, 4096)


if __name__ == "__main__":
    main(*sys.argv[1:])
