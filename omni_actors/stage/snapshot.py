"""A stage's snapshot: the counts of its parts as metrics, made on the main thread once per heartbeat interval."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from omni_actors.protocol.telemetry import Snapshot
from omni_actors.stage.actor import StageActor
from omni_actors.stage.engine_interface import EngineStatistics, StageEngine
from omni_actors.stage.meter import StageMeter
from omni_actors.telemetry import metric_table as table
from omni_actors.telemetry.meters import Meters, edge_metrics, process_metrics
from omni_actors.transport.credit import EdgeMetrics

ENDED_BYTES = len(msgspec.msgpack.encode("ended")) + 3  # the field, which is left out while empty, and its length


class Baseline:
    """What the process had counted when the session began, so that a session reports only its own share.

    The coordinator adds up sessions, whether of one process or of several.
    """

    def __init__(self, engine: StageEngine) -> None:
        self.engine = engine
        self._before = engine.statistics()
        self._processor_time = time.process_time()

    @property
    def processor_time(self) -> float:
        """Seconds since the session began."""
        return time.process_time() - self._processor_time

    def statistics(self) -> EngineStatistics | None:
        """vLLM's counts since the session began, and its present gauges; `None` for an engine without vLLM."""
        now, before = self.engine.statistics(), self._before
        if now is None or before is None:
            return now
        budget = now.budget
        if budget is not None and before.budget is not None:
            budget = replace(budget, deferrals=budget.deferrals - before.budget.deferrals)
        return replace(
            now,
            budget=budget,
            preemptions=now.preemptions - before.preemptions,
            prefix_queries=now.prefix_queries - before.prefix_queries,
            prefix_hits=now.prefix_hits - before.prefix_hits,
        )


def snapshot(
    meter: StageMeter,
    actor: StageActor,
    baseline: Baseline,
    rejected: Mapping[str, int],
    edges: Mapping[str, EdgeMetrics],
    held: Mapping[str, int],
    limit: int,
) -> Snapshot:
    """All metrics of this session, and as many timelines of ended requests as fit into the same message.

    Args:
        rejected: counts of messages that did not decode, by reason.
        edges: by receiver, such as "talker/0" or "coordinator".
        held: counts of the I/O threads: `arena_bytes`, `dropped_arena_full`.
        limit: maximum bytes of a message's body.
    """
    meters, labels = meter.meters, meter.labels
    counts = actor.held()  # does not ask the engine, whose workers may be gone when the last snapshot is made
    meters.set(table.STAGE_HELD, *labels, to=counts["requests"])
    meters.set(table.EARLY_CHUNKS, *labels, to=counts["early_chunk_bytes"])
    meters.set(table.INPUT_TOKENS, *labels, to=meter.input_tokens)
    meters.set(table.OUTPUT_TOKENS, *labels, to=meter.output_tokens)
    meters.set(table.STAGE_AUDIO, *labels, to=meter.audio_seconds)
    meters.set(table.STAGE_PICTURES, *labels, to=meter.pictures)
    meters.set(table.ARENA, *labels, to=held.get("arena_bytes", 0))
    meters.set(table.ARENA_FULL, *labels, to=held.get("dropped_arena_full", 0))
    meters.set_all(table.HELD_BACK, labels, meter.held_back)
    meters.set_all(table.DROPPED, labels, actor.dropped)
    meters.set_all(table.REJECTED, (*labels, "inbox"), rejected)
    edge_metrics(meters, "/".join(labels), edges)
    process_metrics(meters, labels, baseline.processor_time)
    _engine_metrics(meters, labels, baseline)
    metrics = meters.snapshot()
    room = limit - len(msgspec.msgpack.encode(metrics)) - ENDED_BYTES
    return msgspec.structs.replace(metrics, ended=meter.take_unreported(room))


def _engine_metrics(meters: Meters, labels: tuple[str, ...], baseline: Baseline) -> None:
    meters.set(table.DEVICE_BYTES, *labels, to=baseline.engine.device_bytes())
    statistics = baseline.statistics()
    if statistics is None:
        return
    meters.set(table.VLLM_RUNNING, *labels, to=statistics.running)
    meters.set(table.VLLM_WAITING, *labels, to=statistics.waiting)
    meters.set(table.VLLM_KV, *labels, to=statistics.kv_usage)
    meters.set(table.VLLM_PREEMPTIONS, *labels, to=statistics.preemptions)
    meters.set(table.VLLM_QUERIES, *labels, to=statistics.prefix_queries)
    meters.set(table.VLLM_HITS, *labels, to=statistics.prefix_hits)
    if (budget := statistics.budget) is not None:
        meters.set(table.BUDGET_BYTES, *labels, to=budget.limit_bytes)
        meters.set(table.BUDGET_HELD, *labels, to=budget.held_bytes)
        meters.set(table.BUDGET_STEP, *labels, to=budget.step_bytes)
        meters.set(table.BUDGET_WAITING, *labels, to=budget.waiting)
        meters.set(table.BUDGET_DEFERRALS, *labels, to=budget.deferrals)
