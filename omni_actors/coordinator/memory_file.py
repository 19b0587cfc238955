"""The file in the run directory by which a restarted coordinator knows the scale and the drains of the one before.

Without it, which is until an operator changes something, the pipeline is as configured. The next launch removes it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.memory import FleetMemory, decode
from omni_actors.errors import StartupError
from omni_actors.host.run_directory import FLEET
from omni_actors.logs import get_logger

logger = get_logger(__name__)


class MemoryFile:
    """One per coordinator."""

    def __init__(self, run_dir: str) -> None:
        self._path = Path(run_dir) / FLEET

    def read(self, pipeline: PipelineConfig) -> FleetMemory | None:
        """Return what was remembered, `None` if nothing was.

        Raises:
            StartupError: the file is broken, or not of this pipeline.
        """
        try:
            return decode(self._path.read_bytes(), pipeline)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StartupError(
                f"Cannot read {self._path}, by which the coordinator remembers how stages were scaled and what was "
                f"drained: {error}.",
                hint="Put the file back as it was; or remove it, and the pipeline goes on with the replicas of its "
                "configuration.",
            ) from error

    def write(self, memory: FleetMemory) -> None:
        """Replace the file. If that fails, the log says what a restarted coordinator would not know."""
        new = self._path.with_suffix(".new")
        try:
            new.write_bytes(msgspec.json.encode(memory))
            os.replace(new, self._path)
        except OSError as error:
            logger.error(
                "a restarted coordinator would not know of the last scaling or drain: cannot write %s: %s; make room, "
                "and give the command again",
                self._path,
                error,
            )
