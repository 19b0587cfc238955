"""Counters and gauges as plain numbers, and histograms with fixed buckets.

There is no lock: one thread counts, and others may read, as every change assigns one number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from omni_actors.protocol.telemetry import HistogramSample, Sample, Snapshot, TransferTimeline
from omni_actors.telemetry import metric_table as table
from omni_actors.telemetry.metric_table import TABLE, Kind, Metric
from omni_actors.transport.credit import EdgeMetrics

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


@dataclass(slots=True)
class TransferTrack:
    """Grows with every message. `latency` is the edge's histogram, which all requests share."""

    latency: Histogram
    messages: int = 0
    bytes: int = 0
    first_sent: float = 0.0
    first_received: float = 0.0
    last_sent: float = 0.0
    last_received: float = 0.0

    def add(self, sent: float, received: float, size: int, offset: float = 0.0) -> None:
        """Count a message of `size` bytes. `offset` is added to the sender's moments to compare them with ours."""
        self.messages += 1
        self.bytes += size
        if not sent:
            return
        if not self.first_sent:
            self.first_sent, self.first_received = sent, received
        self.last_sent, self.last_received = sent, received
        self.latency.observe(received - sent - offset)

    def timeline(self, source: str) -> TransferTimeline:
        """What goes into a stage's timeline."""
        return TransferTimeline(
            source, self.messages, self.bytes, self.first_sent, self.first_received, self.last_sent, self.last_received
        )


def track_of(tracks: dict[str, TransferTrack], meters: Meters, source: str, target: str) -> TransferTrack:
    """The request's track for messages from `source`, created with the first of them."""
    found = tracks.get(source)
    if found is None:
        found = tracks[source] = TransferTrack(meters.histogram(table.EDGE_LATENCY, source, target))
    return found


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
