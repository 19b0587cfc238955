"""Render metrics as Prometheus text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from omni_actors.telemetry.meters import Labels, Meters
from omni_actors.telemetry.metric_table import TABLE, Kind, Metric

T = TypeVar("T")


def families(meters: Meters, table: Mapping[str, Metric] = TABLE) -> Iterator[Family]:
    """Every metric of a table, in its order, including those without a series."""
    values = _by_name(meters.values)
    histograms = _by_name(meters.histograms)
    for metric in table.values():
        if metric.kind is Kind.HISTOGRAM:
            family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, histogram in histograms.get(metric.name, ()):
                bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
                sums = [float(count) for count in itertools.accumulate(histogram.counts)]
                family.add_metric(labels, list(zip(bounds, sums, strict=True)), histogram.total)
            yield family
            continue
        make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        plain = make(metric.name, metric.help, labels=metric.labels)
        for labels, value in values.get(metric.name, ()):
            plain.add_metric(labels, value)
        yield plain


def _by_name(series: Mapping[tuple[str, Labels], T]) -> dict[str, list[tuple[Labels, T]]]:
    """The series of each metric, in order of their labels."""
    found: dict[str, list[tuple[Labels, T]]] = {}
    for name, labels in sorted(series):
        found.setdefault(name, []).append((labels, series[(name, labels)]))
    return found


class _MetersCollector(Collector):
    """Adapts `Meters` to prometheus-client."""

    def __init__(self, meters: Meters, table: Mapping[str, Metric]) -> None:
        self._meters = meters
        self._table = table

    def collect(self) -> Iterable[Family]:
        return families(self._meters, self._table)


def render(meters: Meters, table: Mapping[str, Metric] = TABLE) -> str:
    """The values of a table's metrics in the text format 0.0.4."""
    text: bytes = generate_latest(_MetersCollector(meters, table))
    return text.decode()
