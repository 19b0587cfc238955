"""The launch as a whole: whether the pipeline starts, serves, drains or ends, and what keeps it from being ready."""

from __future__ import annotations

from dataclasses import dataclass

from omni_actors.coordinator.core.health import HealthPolicy
from omni_actors.coordinator.core.instructions import Progress
from omni_actors.coordinator.core.nodes import NodeTable
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.states import LAUNCH_TRANSITIONS, LaunchEvent, LaunchState, ReplicaState
from omni_actors.transitions import advance

REDRAW_SECONDS = 0.5  # between two progress reports on a terminal
PROGRESS_SECONDS = 5.0  # until the first one elsewhere; each further one takes twice as long


@dataclass(frozen=True)
class Culprit:
    """A replica that fails the launch. Its log is awaited until `until`."""

    replica: Replica
    what: str
    until: float


def explain_end(replica: Replica, what: str, log: str) -> str:
    """Say what happened to a replica, with its last words and the end of its log if there are any."""
    words = f" {replica.last_words.strip()}" if replica.last_words else ""
    tail = f"\n--- last lines of its log\n{log}\n---" if log else ""
    return f"{replica.name} {what} while {replica.phase}.{words}{tail}"


class Launch:
    """Times are seconds of one monotonic clock.

    Args:
        began: when the launch began; timeouts count from there.
        started: when the launcher's process started, for the times that are shown.
    """

    def __init__(
        self,
        replicas: ReplicaTable,
        nodes: NodeTable,
        health: HealthPolicy,
        began: float,
        now: float,
        started: float | None = None,
    ) -> None:
        self._replicas = replicas
        self._nodes = nodes
        self._health = health
        self.began = began
        self._started = began if started is None else started
        self._next_redraw = now + REDRAW_SECONDS
        self._next_line = now + PROGRESS_SECONDS
        self._line_seconds = PROGRESS_SECONDS
        self.state = LaunchState.STARTING
        self.culprit: Culprit | None = None
        self.failure = ""  # why the launch failed

    @property
    def starting(self) -> bool:
        """Whether the first start is still going on."""
        return self.state is LaunchState.STARTING

    @property
    def serving(self) -> bool:
        """Whether every replica has been ready, and requests are still answered."""
        return self.state in (LaunchState.LAUNCHED, LaunchState.DRAINING)

    @property
    def ending(self) -> bool:
        """Whether requests are no longer answered and processes shut down."""
        return self.state in (LaunchState.STOPPING, LaunchState.FAILED)

    @property
    def wanted(self) -> bool:
        """Whether the pipeline is meant to go on."""
        return self.state in (LaunchState.STARTING, LaunchState.LAUNCHED)

    def on(self, event: LaunchEvent) -> None:
        """Enter the state that follows."""
        self.state = advance(LAUNCH_TRANSITIONS, self.state, event)

    def fail(self, reason: str) -> None:
        """End the launch; `reason` is what the launcher prints."""
        self.on(LaunchEvent.FAIL)
        self.failure = reason

    def missing(self) -> list[Replica]:
        """Replicas that the launch waits for: those that are not ready and may still become so."""
        return [replica for replica in self._replicas.missing() if replica.state is not ReplicaState.DEAD]

    def overdue(self, now: float) -> Replica | None:
        """The first replica that is not ready within its startup timeout."""
        for replica in self.missing():
            if now > self.began + self._health.startup_timeout(replica):
                return replica
        return None

    def reports(self, now: float) -> list[Progress]:
        """What to show of the progress now, if anything; counts as shown."""
        is_line = now >= self._next_line
        if is_line:
            self._line_seconds *= 2
            self._next_line = now + self._line_seconds
        elif now < self._next_redraw:
            return []
        self._next_redraw = now + REDRAW_SECONDS
        return [Progress(self.progress(now), is_line)]

    def after(self, now: float) -> float:
        """Seconds since the launcher's process started."""
        return now - self._started

    def progress(self, now: float) -> str:
        """Say how many replicas are ready, how long that took, and what is missing."""
        ready = sum(replica.ready for replica in self._replicas)
        missing = [f"{replica.name} ({replica.phase})" for replica in self._replicas.missing()]
        away = [f"node {node.rank}" for node in self._nodes.absent()]
        shown = ", ".join(away + missing) or "none"
        return f"{ready} of {ready + len(missing)} ready after {self.after(now):.0f} s; missing: {shown}"
