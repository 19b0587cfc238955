"""Metrics that stages and the coordinator share: those of their edges and of their process."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from omni_actors.telemetry import metric_table as table
from omni_actors.telemetry.meters import Meters
from omni_actors.transport.credit import EdgeMetrics


def edge_metrics(meters: Meters, source: str, edges: Mapping[str, EdgeMetrics]) -> None:
    """Set the sender's metrics of its edges. An edge that is gone keeps its counters and loses its gauges."""
    for gauge in (table.EDGE_OUT, table.EDGE_OUT_BYTES, table.EDGE_CREDIT, table.EDGE_WAITING):
        meters.forget(gauge)
    for target, edge in edges.items():
        meters.set(table.EDGE_MESSAGES, source, target, to=edge.messages)
        meters.set(table.EDGE_BYTES, source, target, to=edge.bytes)
        meters.set(table.EDGE_SHARED, source, target, to=edge.shared_bytes)
        if edge.open:
            meters.set(table.EDGE_OUT, source, target, to=edge.messages_out)
            meters.set(table.EDGE_OUT_BYTES, source, target, to=edge.bytes_out)
            meters.set(table.EDGE_CREDIT, source, target, to=edge.credit)
            meters.set(table.EDGE_WAITING, source, target, to=edge.waiting)


def process_metrics(meters: Meters, labels: tuple[str, ...], processor_time: float) -> None:
    """Set the memory of this process, and the processor time in seconds to report for it."""
    meters.set(table.RESIDENT, *labels, to=psutil.Process().memory_info().rss)
    meters.set(table.CPU_SECONDS, *labels, to=processor_time)
