"""Figures that stages and coordinator have in common: their edges and their process."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from omni_actors.telemetry import metric_table as table
from omni_actors.telemetry.meters import Meters
from omni_actors.transport.credit import EdgeMetrics


def edge_metrics(meters: Meters, source: str, edges: Mapping[str, EdgeMetrics]) -> None:
    """The sender's side of its edges. What is out and what waits is dropped with an edge that is gone."""
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
    """Memory of this process, and its processor time in seconds as far as it is to be told."""
    meters.set(table.RESIDENT, *labels, to=psutil.Process().memory_info().rss)
    meters.set(table.CPU_SECONDS, *labels, to=processor_time)
