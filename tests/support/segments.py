"""Processes that make named shared memory and never remove it, as engines do that are killed."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from omni_actors.config import PipelineConfig, StageConfig
from omni_actors.host.segments import FOLDER
from omni_actors.stage.echo import EchoEngine

# Maps the files of its arguments, or makes one in its first argument's place, until its standard input closes.
HOLDER = """
import mmap, sys
maps = []
for name in sys.argv[1:]:
    with open(name, "a+b") as file:
        file.truncate(4096)
        maps.append(mmap.mmap(file.fileno(), 4096))
print("holds", flush=True)
sys.stdin.read()
"""


def make() -> str:
    """Make a segment and keep it mapped for the life of this process; returns its path."""
    descriptor, path = tempfile.mkstemp(prefix="omni-test-", dir=FOLDER)
    os.truncate(descriptor, 4096)
    _maps.append(mmap.mmap(descriptor, 4096))
    os.close(descriptor)
    return path


_maps: list[mmap.mmap] = []


def holder(*paths: str) -> subprocess.Popen[bytes]:
    """Start a process that maps these files, which it makes if they are not there."""
    command = [sys.executable, "-S", "-c", HOLDER, *paths]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert started.stdout.readline() == b"holds\n"
    return started


class SegmentStage(EchoEngine):
    """A custom stage with two segments, one of its own and one of a worker's, and a temporary file."""

    def __init__(self, pipeline: PipelineConfig, stage: StageConfig) -> None:
        super().__init__(msgspec.structs.replace(stage, engine={}))
        own = make()
        self._worker = holder(f"{own}-worker")
        descriptor, path = tempfile.mkstemp(prefix="omni-test-")
        os.close(descriptor)
        print("wrote", path, flush=True)
        print("made", own, f"{own}-worker", flush=True)


def made(log: Path) -> list[list[str]]:
    """The segments of each life of a stage, as its log names them."""
    return _said(log, "made")


def written(log: Path) -> list[list[str]]:
    """The temporary file of each life."""
    return _said(log, "wrote")


def _said(log: Path, word: str) -> list[list[str]]:
    return [line.split()[1:] for line in log.read_text().splitlines() if line.startswith(f"{word} ")]
