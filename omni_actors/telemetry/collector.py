"""All of the coordinator's telemetry in one object: requests, snapshots of stages, clocks, exported spans."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import psutil

from omni_actors.config import PipelineConfig
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest
from omni_actors.host.processes import AnchoredClock
from omni_actors.logs import get_logger
from omni_actors.protocol.messages import Observation, Observe, Snapshot, Subject
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.metrics import HTTP_METRICS, TABLE, Kind, Labels, Meters, Metric, edge_metrics
from omni_actors.telemetry.request_log import ObservedRequest, RequestLog
from omni_actors.transport.link import EdgeMetrics

if TYPE_CHECKING:
    from omni_actors.telemetry.otlp import OtlpExporter  # loads OpenTelemetry, which is optional

logger = get_logger(__name__)


def span_exporter(pipeline: PipelineConfig) -> OtlpExporter | None:
    """The exporter that the configuration asks for. Raises `ConfigError` if its packages are not installed."""
    coordinator = pipeline.coordinator
    if coordinator.otlp_endpoint is None:
        return None
    try:
        from omni_actors.telemetry.otlp import OtlpExporter

        return OtlpExporter.connect(pipeline.name, coordinator.otlp_endpoint, coordinator.otlp_protocol)
    except ImportError as error:
        raise ConfigError(
            f"coordinator.otlp_endpoint is set, but OpenTelemetry for {coordinator.otlp_protocol} is not installed: "
            f"{error}.",
            hint="pip install 'omni_actors[trace]', or unset OTEL_EXPORTER_OTLP_ENDPOINT.",
        ) from error


class TelemetryCollector:
    """One per coordinator, on its loop.

    Args:
        exporter: receives every request that has ended.
    """

    def __init__(self, exporter: OtlpExporter | None = None, clock: Callable[[], float] | None = None) -> None:
        self._exporter = exporter
        self._meters = Meters()
        self._processes = ProcessMeters()
        self._restarts: dict[tuple[str, int], int] = {}
        self._spawn_epochs: dict[tuple[str, int], int] = {}  # the first epoch of the present process
        self._rejected_snapshots: Counter[str] = Counter()  # by channel
        self.requests = RequestLog(self._meters, clock or AnchoredClock(), self._export)

    def _export(self, finished: ObservedRequest) -> None:
        if self._exporter is not None:
            self._exporter.export(finished)

    # -- replicas -----------------------------------------------------------------------------------------------------

    def replica_spawned(self, stage: str, replica: int, spawn_epoch: int) -> None:
        """Note that a replica's process will start, or runs and will register. `spawn_epoch` is 0 if none is known."""
        key = (stage, replica)
        self._restarts.setdefault(key, 0)
        before = self._spawn_epochs.get(key, 0)
        self._spawn_epochs[key] = spawn_epoch or before
        if before and spawn_epoch > before:
            self._restarts[key] += 1

    def take_snapshot(self, stage: str, replica: int, snapshot: Snapshot) -> None:
        """Take a snapshot of a living process. One that is wrong is counted and dropped."""
        try:
            self._processes.take(f"{stage}/{replica}", snapshot)
        except InvalidPayload as error:
            self._rejected_snapshots["control"] += 1
            logger.warning("dropped a snapshot: %s", error, extra={"stage": f"{stage}/{replica}"})
            return
        for work in snapshot.ended:
            self.requests.stage_ended(stage, replica, work)

    def take_clients(self, client: bytes, snapshot: Snapshot) -> None:
        """Take a snapshot of a client that is an HTTP server. One that is wrong is counted and dropped."""
        try:
            self._processes.take(client.hex(), snapshot, HTTP_METRICS)
        except InvalidPayload as error:
            self._rejected_snapshots["client"] += 1
            logger.warning("dropped a client's snapshot: %s", error)

    def client_gone(self, client: bytes) -> None:
        """Note that a client has left: its counters are kept, its gauges are not."""
        self._processes.process_ended(client.hex())

    def replica_ended(self, stage: str, replica: int) -> None:
        """Note that a replica's process has ended."""
        self._processes.process_ended(f"{stage}/{replica}")

    def replica_removed(self, stage: str, replica: int) -> None:
        """Note that a replica is gone for good: one that gets its number later is another one."""
        self._restarts.pop((stage, replica), None)
        self._spawn_epochs.pop((stage, replica), None)

    # -- queries ------------------------------------------------------------------------------------------------------

    def answer(self, question: Observe) -> Observation:
        """Answer a question about requests. Raises `InvalidRequest` for one that is not known, or no longer."""
        if question.subject is Subject.RECENT:
            return Observation(timelines=tuple(self.requests.recent(question.count)))
        timeline = self.requests.timeline(question.request_id)
        if timeline is None:
            raise InvalidRequest(
                f"There is no timeline of request {question.request_id!r}.",
                hint="Timelines of the last 200 requests are kept; ids are in the log and in x-request-id.",
            )
        return Observation(timelines=(timeline,))

    def gather(
        self,
        in_flight: int,
        queued: int,
        retained_bytes: int,
        replicas: Mapping[tuple[str, int], tuple[bool, bool, int]],
        edges: Mapping[str, EdgeMetrics],
        rejected: Mapping[str, Mapping[str, int]],
        dropped: Mapping[str, int],
        routed: Mapping[str, int],
    ) -> Meters:
        """All values of the whole pipeline, as of the stages' last snapshots.

        Args:
            replicas: whether a replica is ready, whether it is a spare, and the number of requests bound to it.
            edges: the coordinator's own, by receiver.
            rejected: counts of messages that did not decode, by channel and reason.
            dropped: counts of other messages of no use, by reason.
            routed: counts of choices of a replica, by what decided.
        """
        own = self._meters
        own.set(table.IN_FLIGHT, to=in_flight)
        own.set(table.QUEUED, to=queued)
        own.set(table.RETAINED, to=retained_bytes)
        for metric in (table.READY, table.SPARE, table.BOUND, table.RESTARTS):  # of those that have left
            own.forget(metric)
        for (stage, replica), (ready, spare, bound) in replicas.items():
            own.set(table.READY, stage, str(replica), to=ready and not spare)
            own.set(table.SPARE, stage, str(replica), to=ready and spare)
            own.set(table.BOUND, stage, str(replica), to=bound)
        for (stage, replica), count in self._restarts.items():
            own.set(table.RESTARTS, stage, str(replica), to=count)
        for channel, reasons in rejected.items():
            own.set_all(table.REJECTED, (*table.COORDINATOR, channel), reasons)
        for channel, count in self._rejected_snapshots.items():
            own.set(table.REJECTED, *table.COORDINATOR, channel, "wrong_snapshot", to=count)
        own.set_all(table.DROPPED, table.COORDINATOR, dropped)
        own.set_all(table.ROUTED, (), routed)
        edge_metrics(own, table.COORDINATOR[0], edges)
        own.set(table.RESIDENT, *table.COORDINATOR, to=psutil.Process().memory_info().rss)
        own.set(table.CPU_SECONDS, *table.COORDINATOR, to=time.process_time())
        everything = Meters()
        everything.add(own.snapshot())
        self._processes.add_to(everything)
        return everything

    def tick(self) -> None:
        """Call it a few times a second."""
        self.requests.tick()

    def close(self) -> None:
        """Send what is left to be exported. May take seconds: not on the loop."""
        if self._exporter is not None:
            self._exporter.close()


class ProcessMeters:
    """The latest snapshot of each process of a stage or of the HTTP server, and the sums of those that ended."""

    def __init__(self) -> None:
        self._past = Meters()
        self._now: dict[str, Snapshot] = {}

    def take(self, name: str, snapshot: Snapshot, allowed: Collection[str] = TABLE) -> None:
        """Take the newest snapshot of a process such as "talker/0", which may have the `allowed` metrics.

        Raises:
            InvalidPayload: it is wrong.
        """
        check(snapshot, allowed)
        self._now[name] = snapshot

    def process_ended(self, name: str) -> None:
        """Note that a process has ended: keep its counters, drop its gauges."""
        snapshot = self._now.pop(name, None)
        if snapshot is not None:
            self._past.add(snapshot, counters_only=True)

    def add_to(self, meters: Meters) -> None:
        """Add all values to those in `meters`."""
        for snapshot in (self._past.snapshot(), *self._now.values()):
            meters.add(snapshot)


def check(snapshot: Snapshot, allowed: Collection[str]) -> None:
    """Raise `InvalidPayload` unless every sample belongs to one of the `allowed` metrics of the table."""
    for sample in snapshot.samples:
        metric = _known(sample.name, sample.labels, allowed, histogram=False)
        if not math.isfinite(sample.value) or (metric.kind is Kind.COUNTER and sample.value < 0):
            raise InvalidPayload(f"The metric {metric.name} cannot be {sample.value}.")
    for histogram in snapshot.histograms:
        metric = _known(histogram.name, histogram.labels, allowed, histogram=True)
        if len(histogram.counts) != len(metric.bounds) + 1 or not math.isfinite(histogram.total):
            raise InvalidPayload(f"The histogram {metric.name} has the wrong buckets or no finite sum.")


def _known(name: str, labels: Labels, allowed: Collection[str], histogram: bool) -> Metric:
    metric = TABLE.get(name) if name in allowed else None
    if metric is None or len(labels) != len(metric.labels) or (metric.kind is Kind.HISTOGRAM) != histogram:
        raise InvalidPayload(f"There is no {'histogram' if histogram else 'value'} {name!r} with {len(labels)} labels.")
    return metric
