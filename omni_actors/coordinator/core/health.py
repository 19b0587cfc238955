"""Decides which replicas are stuck, which restart and when. Times are seconds of one monotonic clock."""

from __future__ import annotations

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.states import ReplicaEvent, ReplicaState
from omni_actors.processes import Backoff

MAXIMUM_BACKOFF = 30.0  # seconds


class HealthPolicy:
    """Keeps the restart history and the signs of life of all replicas."""

    def __init__(self, pipeline: PipelineConfig, replicas: ReplicaTable) -> None:
        self._pipeline = pipeline
        self._replicas = replicas
        self._backoffs: dict[tuple[str, int], Backoff] = {}

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
        """Decide whether a lost replica restarts, at `replica.restart_at`.

        The first restart is immediate, the delay of the next ones doubles; at most `restarts` of them within
        `restart_window`. A restart that an operator asked for does not count.
        """
        delay: float | None = 0.0
        if not replica.orders.restart:
            stage, window = self._pipeline.stage(replica.stage), self._pipeline.coordinator.restart_window
            backoff = self._backoffs.setdefault(
                (replica.stage, replica.index), Backoff(stage.restart_backoff, MAXIMUM_BACKOFF, stage.restarts, window)
            )
            delay = backoff.next(now)
        replica.restart_at = now + (delay or 0.0)
        return delay is not None

    def revive(self, replica: Replica, now: float) -> None:
        """Restart a dead replica at once and forget its former restarts."""
        self._backoffs.pop((replica.stage, replica.index), None)
        replica.on(ReplicaEvent.REVIVED)
        replica.restart_at = now

    def restarts(self, replica: Replica) -> int:
        """Restarts of a replica that count towards its limit."""
        backoff = self._backoffs.get((replica.stage, replica.index))
        return backoff.restarts if backoff is not None else 0

    def due(self, now: float) -> list[Replica]:
        """Replicas whose restart is due."""
        return [
            replica for replica in self._replicas if replica.state is ReplicaState.WAITING and replica.restart_at <= now
        ]

    def drained(self, now: float) -> list[Replica]:
        """Replicas that drain for a restart and are empty, or have drained for too long."""
        return [
            replica
            for replica in self._replicas
            if replica.state is ReplicaState.DRAINING
            and replica.orders.restart
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
            return f"no progress for {now - replica.moved:.1f} s with {len(replica.requests)} requests"
        return ""

    def startup_timeout(self, replica: Replica) -> float:
        """Seconds that a replica may take from its start until it is ready."""
        own = self._pipeline.stage(replica.stage).startup_timeout
        return own if own is not None else self._pipeline.coordinator.startup_timeout
