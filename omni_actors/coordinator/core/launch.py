"""The launch as a whole: whether the pipeline starts, serves, drains or ends, and what keeps it from being ready."""

from __future__ import annotations

from dataclasses import dataclass

from omni_actors.coordinator.core.health import HealthPolicy
from omni_actors.coordinator.core.nodes import NodeTable
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.states import LAUNCH_TRANSITIONS, LaunchEvent, LaunchState, ReplicaState
from omni_actors.transitions import advance

PROGRESS_SECONDS = 5.0  # between two progress reports


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
        began: when the launcher started.
    """

    def __init__(
        self, replicas: ReplicaTable, nodes: NodeTable, health: HealthPolicy, began: float, now: float
    ) -> None:
        self._replicas = replicas
        self._nodes = nodes
        self._health = health
        self.began = began
        self._next_report = now + PROGRESS_SECONDS
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

    def report_due(self, now: float) -> bool:
        """Whether to report progress again; counts as reported."""
        due = now >= self._next_report
        if due:
            self._next_report = now + PROGRESS_SECONDS
        return due

    def progress(self) -> str:
        """List what is ready and what is missing, for the terminal."""
        ready = [replica.name for replica in self._replicas if replica.ready]
        missing = [f"{replica.name} ({replica.phase})" for replica in self._replicas.missing()]
        away = [f"node {node.rank}" for node in self._nodes.absent()]
        return f"ready: {', '.join(ready) or 'none'}; missing: {', '.join(away + missing) or 'none'}"
