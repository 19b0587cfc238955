"""Which replicas are stuck, which are started again and when. Times are of one monotonic clock that the caller has."""

from __future__ import annotations

import collections

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.states import ReplicaEvent, ReplicaState

MAXIMUM_BACKOFF = 30.0
LATE_LOOK_SECONDS = 1.0  # between two looks; after more, it is the looking process that had stopped


class HealthPolicy:
    """Owns the history of restarts and the signs of life of all replicas."""

    def __init__(self, pipeline: PipelineConfig, replicas: ReplicaTable) -> None:
        self._pipeline = pipeline
        self._replicas = replicas
        self._restarts: dict[tuple[str, int], collections.deque[float]] = collections.defaultdict(collections.deque)
        self._looked = 0.0

    def spawned(self, replica: Replica, now: float) -> None:
        replica.spawned = replica.heard = replica.moved = now

    def beat(self, replica: Replica, progress: int, now: float) -> None:
        """A heartbeat with the progress of the engine loop."""
        replica.heard = now
        if progress != replica.progress:
            replica.progress, replica.moved = progress, now

    def ready(self, replica: Replica, now: float) -> None:
        replica.heard = replica.moved = now

    def plan(self, replica: Replica, now: float) -> bool:
        """A replica was lost: whether it is started again, at `replica.restart_at`.

        The first restart comes at once, the next ones after a time that doubles; at most `restarts` of them within
        `restart_window`.
        """
        if replica.restart_wanted:  # not its fault
            replica.restart_at = now
            return True
        stage = self._pipeline.stage(replica.stage)
        recent = self._restarts[(replica.stage, replica.index)]
        while recent and recent[0] + self._pipeline.coordinator.restart_window <= now:
            recent.popleft()
        if len(recent) >= stage.restarts:
            return False
        delay = min(MAXIMUM_BACKOFF, stage.restart_backoff * 2 ** (len(recent) - 1)) if recent else 0.0
        recent.append(now)
        replica.restart_at = now + delay
        return True

    def revive(self, replica: Replica, now: float) -> None:
        """Somebody wants a replica back that was given up."""
        self._restarts.pop((replica.stage, replica.index), None)
        replica.on(ReplicaEvent.REVIVED)
        replica.restart_at = now

    def restarts(self, replica: Replica) -> int:
        """How often it was started again within the window."""
        return len(self._restarts.get((replica.stage, replica.index), ()))

    def due(self, now: float) -> list[Replica]:
        """Replicas to be started now."""
        return [
            replica for replica in self._replicas if replica.state is ReplicaState.WAITING and replica.restart_at <= now
        ]

    def drained(self, now: float) -> list[Replica]:
        """Replicas that somebody wants to be restarted and that hold nothing any more, or have held it for too long."""
        return [
            replica
            for replica in self._replicas
            if replica.state is ReplicaState.DRAINING
            and replica.restart_wanted
            and not replica.stopping
            and (not replica.requests or replica.drain_until <= now)
        ]

    def stuck(self, now: float) -> list[tuple[Replica, str]]:
        """Replicas whose process lives but does nothing, each with the reason."""
        late = self._looked and now > self._looked + LATE_LOOK_SECONDS
        self._looked = now
        if late:  # this process itself was stopped or busy: what the replicas said meanwhile is not read yet
            for replica in self._replicas:
                replica.heard = replica.moved = now
            return []
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
