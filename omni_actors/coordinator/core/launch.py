"""The launch as a whole, and the health of its replicas: which are stuck, which restart and when.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.instructions import ShowProgress
from omni_actors.coordinator.core.nodes import NodeTable
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.states import LAUNCH_TRANSITIONS, LaunchEvent, LaunchState, ReplicaEvent, ReplicaState
from omni_actors.errors import counted
from omni_actors.host.processes import Backoff
from omni_actors.transitions import advance

MAXIMUM_BACKOFF = 30.0  # seconds
FRUITLESS = 10  # times `restarts`: losses in a row of a replica that becomes ready and finishes no request


class RestartHistory:
    """Decides whether one replica restarts, and after how long. Losses of healthy processes are no reason to stop.

    A series of restarts ends when the replica becomes ready: at most `restarts` of them start a process that does not.
    A replica that becomes ready, but is lost again and again before it has finished a request, is given up as well,
    after `FRUITLESS` times as many losses: that many are possible if something else kills it.
    """

    def __init__(self, first: float, restarts: int, window: float) -> None:
        self._starts = Backoff(first, MAXIMUM_BACKOFF, restarts, window)
        self._fruitless = Backoff(first, first, FRUITLESS * restarts, FRUITLESS * window)

    def next(self, now: float, was_ready: bool, productive: bool) -> float | None:
        """Count a loss and return the seconds until the restart; `None` for no restart."""
        delay: float | None = 0.0
        if was_ready:
            self._starts.reset()
            if productive:
                self._fruitless.reset()
            delay = self._fruitless.next(now)
        after = self._starts.next(now)
        return None if delay is None or after is None else max(delay, after)

    @property
    def restarts(self) -> int:
        """Restarts that count towards one of the limits."""
        return max(self._starts.restarts, self._fruitless.restarts)


class HealthPolicy:
    """Keeps the restart history and the signs of life of all replicas."""

    def __init__(self, pipeline: PipelineConfig, replicas: ReplicaTable) -> None:
        self._pipeline = pipeline
        self._replicas = replicas
        self._histories: dict[tuple[str, int], RestartHistory] = {}

    def spawned(self, replica: Replica, now: float) -> None:
        """Start all clocks of a process that was started now."""
        replica.spawned = replica.heard = replica.moved = now

    def beat(self, replica: Replica, progress: int, now: float) -> None:
        """Take a heartbeat with the progress of the engine loop."""
        replica.heard = now
        if progress != replica.progress:
            replica.progress, replica.moved = progress, now

    def ready(self, replica: Replica, now: float) -> None:
        """Start the clocks for heartbeat and progress of a replica that has become ready."""
        replica.heard = replica.moved = now

    def plan(self, replica: Replica, now: float) -> bool:
        """Decide whether a lost replica restarts, at `replica.restart_at`. Call it before the replica leaves its state.

        A restart that an operator asked for does not count.
        """
        delay: float | None = 0.0
        if not replica.orders.restart:
            stage, window = self._pipeline.stage(replica.stage), self._pipeline.coordinator.restart_window
            history = self._histories.setdefault(
                (replica.stage, replica.index), RestartHistory(stage.restart_backoff, stage.restarts, window)
            )
            was_ready = replica.state in (ReplicaState.READY, ReplicaState.DRAINING)
            delay = history.next(now, was_ready, replica.productive)
        replica.restart_at = now + (delay or 0.0)
        return delay is not None

    def revive(self, replica: Replica, now: float) -> None:
        """Restart a dead replica at once and forget its former restarts."""
        self._histories.pop((replica.stage, replica.index), None)
        replica.on(ReplicaEvent.REVIVED)
        replica.restart_at = now

    def forget(self, replica: Replica) -> None:
        """Forget the restarts of a replica that is gone for good."""
        self._histories.pop((replica.stage, replica.index), None)

    def restarts(self, replica: Replica) -> int:
        """Restarts of a replica that count towards its limit."""
        history = self._histories.get((replica.stage, replica.index))
        return history.restarts if history is not None else 0

    def due(self, now: float) -> list[Replica]:
        """Replicas whose restart is due."""
        return [
            replica for replica in self._replicas if replica.state is ReplicaState.WAITING and replica.restart_at <= now
        ]

    def drained(self, now: float) -> list[Replica]:
        """Replicas that drain for a restart or to leave, and are empty or have drained for too long."""
        return [
            replica
            for replica in self._replicas
            if replica.state is ReplicaState.DRAINING
            and (replica.orders.restart or replica.leaving)
            and not replica.stopping
            and (not replica.requests or replica.orders.drain_until <= now)
        ]

    def excuse_all(self, now: float) -> None:
        """Count everything as heard of now: this process itself was stopped, and what came meanwhile is unread."""
        for replica in self._replicas:
            replica.heard = replica.moved = now

    def stuck(self, now: float) -> list[tuple[Replica, str]]:
        """Replicas whose process lives but does nothing, each with the reason."""
        return [(replica, why) for replica in self._replicas if (why := self._why_stuck(replica, now))]

    def _why_stuck(self, replica: Replica, now: float) -> str:
        stage, coordinator = self._pipeline.stage(replica.stage), self._pipeline.coordinator
        if replica.state in (ReplicaState.STARTING, ReplicaState.LOADING):
            limit = self.startup_timeout(replica)
            return f"not ready after {limit:g} s" if now > replica.spawned + limit else ""
        if replica.state not in (ReplicaState.READY, ReplicaState.DRAINING):
            return ""
        if now > replica.heard + coordinator.heartbeat_timeout:
            return f"no sign of life for {now - replica.heard:.1f} s"
        if replica.requests and now > replica.moved + stage.stall_timeout:
            return f"no progress for {now - replica.moved:.1f} s with {counted(len(replica.requests), 'request')}"
        return ""

    def startup_timeout(self, replica: Replica) -> float:
        """Seconds that a replica may take from its start until it is ready."""
        own = self._pipeline.stage(replica.stage).startup_timeout
        return own if own is not None else self._pipeline.coordinator.startup_timeout


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

    def reports(self, now: float) -> list[ShowProgress]:
        """What to show of the progress now, if anything; counts as shown."""
        is_line = now >= self._next_line
        if is_line:
            self._line_seconds *= 2
            self._next_line = now + self._line_seconds
        elif now < self._next_redraw:
            return []
        self._next_redraw = now + REDRAW_SECONDS
        return [ShowProgress(self.progress(now), is_line)]

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
