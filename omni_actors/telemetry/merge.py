"""Merge the snapshots of all stage processes; a replica's counters continue across its restarts."""

from __future__ import annotations

import math

from omni_actors.errors import InvalidPayload
from omni_actors.protocol.telemetry import Snapshot
from omni_actors.telemetry.meters import Labels, Meters
from omni_actors.telemetry.metric_table import TABLE, Kind, Metric


class StageMeters:
    """The latest snapshot of each replica's process, and the sums of the processes that ended."""

    def __init__(self) -> None:
        self._past = Meters()
        self._now: dict[str, Snapshot] = {}

    def take(self, name: str, snapshot: Snapshot) -> None:
        """Take the newest snapshot of a replica such as "talker/0". Raises `InvalidPayload` if it is wrong."""
        check(snapshot)
        self._now[name] = snapshot

    def process_ended(self, name: str) -> None:
        """Note that a replica's process has ended: keep its counters, drop its gauges."""
        snapshot = self._now.pop(name, None)
        if snapshot is not None:
            self._past.add(snapshot, counters_only=True)

    def add_to(self, meters: Meters) -> None:
        """Add all values to those in `meters`."""
        for snapshot in (self._past.snapshot(), *self._now.values()):
            meters.add(snapshot)


def check(snapshot: Snapshot) -> None:
    """Raise `InvalidPayload` unless every sample belongs to a metric of the table."""
    for sample in snapshot.samples:
        metric = _known(sample.name, sample.labels, histogram=False)
        if not math.isfinite(sample.value) or (metric.kind is Kind.COUNTER and sample.value < 0):
            raise InvalidPayload(f"The metric {metric.name} cannot be {sample.value}.")
    for histogram in snapshot.histograms:
        metric = _known(histogram.name, histogram.labels, histogram=True)
        if len(histogram.counts) != len(metric.bounds) + 1 or not math.isfinite(histogram.total):
            raise InvalidPayload(f"The histogram {metric.name} has the wrong buckets or no finite sum.")


def _known(name: str, labels: Labels, histogram: bool) -> Metric:
    metric = TABLE.get(name)
    if metric is None or len(labels) != len(metric.labels) or (metric.kind is Kind.HISTOGRAM) != histogram:
        raise InvalidPayload(f"There is no {'histogram' if histogram else 'value'} {name!r} with {len(labels)} labels.")
    return metric
