"""What a process counts: plain numbers and histograms with fixed buckets. No lock: one thread counts.

Another thread may read: every change is one assignment of a number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from omni_actors.protocol.telemetry import HistogramSample, Sample
from omni_actors.telemetry.metric_table import Metric

Labels = tuple[str, ...]


class Histogram:
    """Observations per bucket (the last bucket is +Inf), not cumulated, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """A value of less than zero (clocks that differ) counts as zero."""
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
        key = (metric.name, labels)
        self.values[key] = self.values.get(key, 0) + by

    def set(self, metric: Metric, *labels: str, to: float) -> None:
        """For gauges, and for counters that somebody else keeps."""
        self.values[(metric.name, labels)] = to

    def set_all(self, metric: Metric, labels: Labels, values: Mapping[str, float]) -> None:
        """The same for a metric whose last label is the key of a mapping."""
        for name, value in values.items():
            self.values[(metric.name, (*labels, name))] = value

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """The histogram of these labels, to be kept by whoever observes often."""
        key = (metric.name, labels)
        found = self.histograms.get(key)
        if found is None:
            found = self.histograms[key] = Histogram(metric.bounds)
        return found

    def forget(self, metric: Metric) -> None:
        """Drop all series of a gauge whose labels come and go; those that are there are set again."""
        for key in [key for key in self.values if key[0] == metric.name]:
            del self.values[key]

    def samples(self) -> tuple[Sample, ...]:
        return tuple(Sample(name, labels, float(value)) for (name, labels), value in self.values.items())

    def histogram_samples(self) -> tuple[HistogramSample, ...]:
        return tuple(
            HistogramSample(name, labels, tuple(histogram.counts), histogram.total)
            for (name, labels), histogram in self.histograms.items()
        )
