"""Counters and gauges as plain numbers, and histograms with fixed buckets.

There is no lock: one thread counts, and others may read, as every change assigns one number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from omni_actors.protocol.telemetry import HistogramSample, Sample, Snapshot
from omni_actors.telemetry.metric_table import TABLE, Kind, Metric

Labels = tuple[str, ...]


class Histogram:
    """Observations per bucket, not cumulated, and their sum. The last bucket is +Inf."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value. A negative one, from clocks that differ, counts as zero."""
        if value < 0.0:
            value = 0.0
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Meters:
    """The values of one process by metric and labels."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, Labels], float] = {}
        self.histograms: dict[tuple[str, Labels], Histogram] = {}

    def count(self, metric: Metric, *labels: str, by: float = 1) -> None:
        """Increase a value."""
        key = (metric.name, labels)
        self.values[key] = self.values.get(key, 0) + by

    def set(self, metric: Metric, *labels: str, to: float) -> None:
        """Set a gauge, or a counter that is kept elsewhere."""
        self.values[(metric.name, labels)] = to

    def set_all(self, metric: Metric, labels: Labels, values: Mapping[str, float]) -> None:
        """Set a metric for each value of its last label; the mapping's keys are these values."""
        for name, value in values.items():
            self.values[(metric.name, (*labels, name))] = value

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """The histogram of these labels. Keep it if you observe often."""
        key = (metric.name, labels)
        found = self.histograms.get(key)
        if found is None:
            found = self.histograms[key] = Histogram(metric.bounds)
        return found

    def forget(self, metric: Metric) -> None:
        """Drop all series of a gauge whose labels come and go, before setting those that exist."""
        for key in [key for key in self.values if key[0] == metric.name]:
            del self.values[key]

    def snapshot(self) -> Snapshot:
        """All values as a message."""
        samples = [Sample(name, labels, float(value)) for (name, labels), value in self.values.items()]
        histograms = [
            HistogramSample(name, labels, tuple(histogram.counts), histogram.total)
            for (name, labels), histogram in self.histograms.items()
        ]
        return Snapshot(samples=tuple(samples), histograms=tuple(histograms))

    def add(self, snapshot: Snapshot, counters_only: bool = False) -> None:
        """Add the values of a snapshot that fits the table; `counters_only` leaves out its gauges."""
        for sample in snapshot.samples:
            metric = TABLE[sample.name]
            if not counters_only or metric.kind is Kind.COUNTER:
                self.count(metric, *sample.labels, by=sample.value)
        for histogram in snapshot.histograms:
            into = self.histogram(TABLE[histogram.name], *histogram.labels)
            for index, count in enumerate(histogram.counts):
                into.counts[index] += count
            into.total += histogram.total
