"""A host with GPUs and MPS, for tests without either: files for the GPUs, stand-ins for NVIDIA's programs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from omni_actors.config import PipelineConfig, StageConfig
from omni_actors.stage.echo import EchoEngine
from tests.support import mps_control

SERVERS = {"": "exec sleep 300", "no server": "echo out of memory >> $CUDA_MPS_LOG_DIRECTORY/server.log; exit 1"}

# Starts the launcher on a host whose GPUs are the files in sys.argv[1].
LAUNCH = """
import pathlib, sys
from omni_actors.config import placement
placement.DEVICE_FILES = pathlib.Path({folder!r})
from omni_actors import launch
if __name__ == "__main__":
    sys.exit(launch.main())
"""


class DeviceStage(EchoEngine):
    """A custom stage that computes on a GPU, as far as its launcher knows."""

    def __init__(self, pipeline: PipelineConfig, stage: StageConfig) -> None:
        super().__init__(stage)
        variables = [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY")]
        print("device stage sees", *variables, flush=True)

    def shutdown(self) -> None:
        print("device stage ended at", time.monotonic(), flush=True)
        super().shutdown()


class MpsHost:
    """Stand-ins in `folder`, and what they have logged.

    Args:
        kind: "" for an MPS that works; "no daemon" and "no server" for one that fails; "stuck" for one whose server
            does not end.
        gpus: number of GPUs; their UUIDs are GPU-0 and so on.
    """

    def __init__(self, folder: Path, kind: str = "", gpus: int = 2) -> None:
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir()
        for gpu in range(gpus):
            (folder / f"nvidia{gpu}").touch()
        (folder / "nvidiactl").touch()
        uuids = "".join(f"{gpu}, GPU-{gpu}\\n" for gpu in range(gpus))
        self._write("nvidia-smi", f"printf '{uuids}'")
        self._write(mps_control.CONTROL, f'exec {sys.executable} -S {mps_control.__file__} "{kind}" "$@"')
        self._write(mps_control.SERVER, SERVERS.get(kind, SERVERS[""]))
        self.path = f"{self.programs}:{os.environ['PATH']}"
        self.script = folder / "launch_here.py"
        self.script.write_text(LAUNCH.format(folder=str(folder)))

    def _write(self, name: str, body: str) -> None:
        (self.programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (self.programs / name).chmod(0o755)

    @contextlib.contextmanager
    def daemon(self, pipes: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A daemon as an administrator would start it."""
        pipes.mkdir()
        environment = {**os.environ, "PATH": self.path, "CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
        command = [str(self.programs / mps_control.CONTROL), "-f"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as daemon:
            try:
                yield daemon
            finally:
                daemon.kill()
                shutil.rmtree(pipes)


def pids(log: str) -> list[int]:
    """The daemon and its servers, as its log names them."""
    return [int(pid) for pid in re.findall(r"(?:control daemon|new server) (\d+)", log)]
