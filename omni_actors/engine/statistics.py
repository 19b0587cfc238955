"""Totals of vLLM's scheduler statistics, which are differences since the last report."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

from omni_actors.stage.engine_interface import EngineStatistics

KEPT_SCHEDULED = 4096  # entries kept until `take_scheduled`; later ones are dropped


class CoreStatistics:
    """Statistics of one engine core, which must run with `log_stats`."""

    def __init__(self) -> None:
        self._preemptions = 0
        self._queries = 0
        self._hits = 0
        self._scheduled: dict[str, float] = {}  # since the last `take_scheduled`
        self._seen: set[str] = set()  # requests scheduled before: a preempted one is scheduled again

    def add(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Add the outputs of a step."""
        for group in outputs.values():
            if group.scheduler_stats is not None:
                self._add_stats(group.scheduler_stats)
            for output in group.outputs:
                for event in output.events or ():
                    if event.type is EngineCoreEventType.PREEMPTED:
                        self._preemptions += 1
                    elif event.type is EngineCoreEventType.SCHEDULED:
                        self._note_scheduled(output.request_id, event.timestamp)
                if output.finish_reason is not None:
                    self._seen.discard(output.request_id)

    def _note_scheduled(self, request_id: str, moment: float) -> None:
        if request_id not in self._seen and len(self._scheduled) < KEPT_SCHEDULED:
            self._seen.add(request_id)
            self._scheduled[request_id] = moment

    def _add_stats(self, stats: SchedulerStats) -> None:
        self._queries += stats.prefix_cache_stats.queries
        self._hits += stats.prefix_cache_stats.hits

    def forget(self, request_ids: list[str]) -> None:
        """Forget aborted requests."""
        self._seen.difference_update(request_ids)

    def take_scheduled(self) -> list[tuple[str, float]]:
        """Requests scheduled for the first time since the last call, and when (monotonic clock, seconds)."""
        taken, self._scheduled = list(self._scheduled.items()), {}
        return taken

    def now(self, scheduler: Scheduler) -> EngineStatistics:
        """The totals, with the scheduler's present state."""
        stats = scheduler.make_stats()
        if stats is not None:
            self._add_stats(stats)
        running, waiting = scheduler.get_request_counts()
        return EngineStatistics(
            running=running,
            waiting=waiting,
            kv_usage=stats.kv_cache_usage if stats is not None else 0.0,
            preemptions=self._preemptions,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
        )
