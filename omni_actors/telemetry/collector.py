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
from omni_actors.protocol.messages import Observation, Observe, Snapshot
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.metrics import HTTP_METRICS, TABLE, Kind, Labels, Meters, Metric, edge_metrics
from omni_actors.telemetry.request_log import RequestLog
from omni_actors.transport.link import PeerLinks

if TYPE_CHECKING:
    from omni_actors.coordinator.core.requests import RequestMachine
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
        self._past = Meters()  # the counters of processes that have ended
        self._present: dict[str, Snapshot] = {}  # the latest of each process of a stage or of the HTTP server
        self._rejected_snapshots: Counter[str] = Counter()  # by channel
        on_settled = exporter.export if exporter is not None else lambda _: None
        self.requests = RequestLog(self._meters, clock or AnchoredClock(), on_settled)

    def take_snapshot(self, stage: str, replica: int, snapshot: Snapshot) -> None:
        """Take a snapshot of a living process. One that is wrong is counted and dropped."""
        if self._take("control", f"{stage}/{replica}", snapshot, TABLE):
            for work in snapshot.ended:
                self.requests.stage_ended(stage, replica, work)

    def take_clients(self, client: bytes, snapshot: Snapshot) -> None:
        """Take a snapshot of a client that is an HTTP server. One that is wrong is counted and dropped."""
        self._take("client", client.hex(), snapshot, HTTP_METRICS)

    def _take(self, channel: str, process: str, snapshot: Snapshot, allowed: Collection[str]) -> bool:
        try:
            check(snapshot, allowed)
        except InvalidPayload as error:
            self._rejected_snapshots[channel] += 1
            logger.warning("dropped a snapshot of %s: %s", process, error)
            return False
        self._present[process] = snapshot
        return True

    def client_gone(self, client: bytes) -> None:
        """Note that a client has left."""
        self.process_ended(client.hex())

    def process_ended(self, process: str) -> None:
        """Note that a process such as "talker/0" has ended: keep its counters, drop its gauges."""
        if (snapshot := self._present.pop(process, None)) is not None:
            self._past.add(snapshot, counters_only=True)

    # -- queries ------------------------------------------------------------------------------------------------------

    def answer(self, question: Observe) -> Observation:
        """Answer a question about requests. Raises `InvalidRequest` for one that is not known, or no longer."""
        if question.subject == "recent":
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
        requests: RequestMachine,
        links: PeerLinks,
        rejected: Mapping[str, Mapping[str, int]],
        dropped: Mapping[str, int],
    ) -> Meters:
        """All values of the whole pipeline, as of the stages' last snapshots.

        Args:
            links: the coordinator's own.
            rejected: counts of messages that did not decode, by channel and reason.
            dropped: counts of other messages of no use, by reason.
        """
        own = self._meters
        own.set(table.IN_FLIGHT, to=requests.in_flight)
        own.set(table.QUEUED, to=requests.queued)
        own.set(table.RETAINED, to=requests.retained.used)
        for metric in (table.READY, table.SPARE, table.BOUND, table.RESTARTS):  # of those that have left
            own.forget(metric)
        for replica in requests.replicas:
            labels = (replica.stage, str(replica.index))
            own.set(table.READY, *labels, to=replica.serves)
            own.set(table.SPARE, *labels, to=replica.ready and replica.spare)
            own.set(table.BOUND, *labels, to=len(replica.requests))
            own.set(table.RESTARTS, *labels, to=replica.restarted)
        for channel, reasons in rejected.items():
            own.set_all(table.REJECTED, (*table.COORDINATOR, channel), reasons)
        for channel, count in self._rejected_snapshots.items():
            own.set(table.REJECTED, *table.COORDINATOR, channel, "wrong_snapshot", to=count)
        own.set_all(table.DROPPED, table.COORDINATOR, dropped)
        own.set_all(table.ROUTED, (), requests.planner.router.chosen)
        edge_metrics(own, table.COORDINATOR[0], links)
        own.set(table.RESIDENT, *table.COORDINATOR, to=psutil.Process().memory_info().rss)
        own.set(table.CPU_SECONDS, *table.COORDINATOR, to=time.process_time())
        everything = Meters()
        for snapshot in (own.snapshot(), self._past.snapshot(), *self._present.values()):
            everything.add(snapshot)
        return everything

    def close(self) -> None:
        """Send what is left to be exported. May take seconds: not on the loop."""
        if self._exporter is not None:
            self._exporter.close()


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
