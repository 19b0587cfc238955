"""The coordinator process, one per pipeline: sockets and clocks around the pure decisions in `core`.

What the launcher and the coordinator's process tell each other is here, so that the launcher loads no coordinator.
"""

from __future__ import annotations

from msgspec import Struct

from omni_actors.config import PipelineConfig
from omni_actors.protocol.messages import Failed


class CoordinatorSpec(Struct, frozen=True):
    """Settings of the process.

    Args:
        began: when the launch began, on the monotonic clock.
        started: when the launcher's process started, on the same.
        generation: how many coordinators this launch had before.
    """

    pipeline: PipelineConfig
    client: str
    control: str
    results: str
    launcher_pid: int
    run_dir: str
    run_dir_is_temporary: bool
    began: float
    started: float
    generation: int = 0

    @property
    def name(self) -> str:
        """Tells this coordinator from all others that clients may have known at its endpoint."""
        return f"{self.launcher_pid}-{self.began}-{self.generation}"


class Listening(Struct, frozen=True, tag="listening"):
    """The coordinator has bound its sockets."""

    client: str
    control: str


class Finished(Struct, frozen=True, tag="finished"):
    """The coordinator ends in order; `failure` says why the launch failed, if it did."""

    failure: str = ""


Answer = Listening | Failed | Finished
