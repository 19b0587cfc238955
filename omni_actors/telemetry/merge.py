"""Merge the snapshots of all stage processes; a replica's counters continue across its restarts."""

from __future__ import annotations

import math

from omni_actors.errors import InvalidPayload
from omni_actors.protocol.telemetry import Snapshot
from omni_actors.telemetry.meters import Histogram, Labels, Meters
from omni_actors.telemetry.metric_table import TABLE, Kind, Metric

Key = tuple[str, Labels]


class StageMeters:
    """The latest snapshot of each replica's process, and the sums of the processes that ended."""

    def __init__(self) -> None:
        self._past = Meters()
        self._now: dict[str, Snapshot] = {}

    def take(self, name: str, snapshot: Snapshot) -> None:
        """Take the newest snapshot of a replica such as "talker/0". Raises `InvalidPayload` if it is wrong."""
        check(snapshot)
        self._now[name] = snapshot

    def gone(self, name: str) -> None:
        """Note that a replica's process has ended: keep its counters, drop its gauges."""
        snapshot = self._now.pop(name, None)
        if snapshot is not None:
            _add(self._past, snapshot, counters_only=True)

    def add_to(self, meters: Meters) -> None:
        """Add all values to those in `meters`."""
        for key, value in self._past.values.items():
            meters.values[key] = meters.values.get(key, 0) + value
        for key, histogram in self._past.histograms.items():
            _add_histogram(meters, key, histogram.counts, histogram.total)
        for snapshot in self._now.values():
            _add(meters, snapshot, counters_only=False)


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


def _add(meters: Meters, snapshot: Snapshot, counters_only: bool) -> None:
    for sample in snapshot.samples:
        if not counters_only or TABLE[sample.name].kind is Kind.COUNTER:
            key = (sample.name, sample.labels)
            meters.values[key] = meters.values.get(key, 0) + sample.value
    for histogram in snapshot.histograms:
        _add_histogram(meters, (histogram.name, histogram.labels), histogram.counts, histogram.total)


def _add_histogram(meters: Meters, key: Key, counts: tuple[int, ...] | list[int], total: float) -> None:
    name, labels = key
    into: Histogram = meters.histogram(TABLE[name], *labels)
    for index, count in enumerate(counts):
        into.counts[index] += count
    into.total += total


def copied(meters: Meters) -> Meters:
    """A copy that can be changed without changing `meters`."""
    copy = Meters()
    copy.values.update(meters.values)
    for key, histogram in meters.histograms.items():
        _add_histogram(copy, key, histogram.counts, histogram.total)
    return copy
