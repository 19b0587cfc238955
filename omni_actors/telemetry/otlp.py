"""Timelines as OpenTelemetry spans, sent to a collector. Needs the extra `trace`; loaded only if it is switched on.

Spans are made when a request is over, out of its timeline, by the coordinator alone: stages do no more for a traced
request than for any other. A request's span is a child of the caller's (`traceparent`), each stage's a child of the
request's, each hop's a child of the stage's that sent.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from omni_actors import __version__
from omni_actors.config import OtlpProtocol
from omni_actors.errors import ConfigError
from omni_actors.telemetry.chart import Chart, HopBar, StageBar, chart
from omni_actors.telemetry.export import INSTALL_HINT
from omni_actors.telemetry.request_log import Finished

CLOSE_SECONDS = 2.0  # for the last spans; the library itself would wait for half a minute


class _GivenIds(RandomIdGenerator):
    """A request that brings no trace has one nevertheless, in its timeline: the spans use the same."""

    trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id or super().generate_trace_id()


class SpanExport:
    """Sends spans from a thread of its own; when the collector is slow or away, spans are dropped, nothing waits.

    Args:
        pipeline: becomes the service's name.
        exporter: where to.
    """

    def __init__(self, pipeline: str, exporter: SpanExporter) -> None:
        self._ids = _GivenIds()
        resource = Resource.create({SERVICE_NAME: f"omni_actors/{pipeline}", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("omni_actors", __version__)

    @classmethod
    def to(cls, pipeline: str, endpoint: str, protocol: OtlpProtocol) -> SpanExport:
        """To a collector; headers, certificates and time-outs are those of the standard variables.

        Raises:
            ConfigError: the exporter for this protocol is not installed.
        """
        exporter: SpanExporter
        try:
            if protocol is OtlpProtocol.GRPC:
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

                exporter = GrpcExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
            else:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

                exporter = HttpExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        except ImportError as error:
            raise ConfigError(f"Spans cannot be sent by {protocol}: {error}.", hint=INSTALL_HINT) from error
        return cls(pipeline, exporter)

    def export(self, finished: Finished) -> None:
        """Queue the spans of one request. Does not wait."""
        if not finished.sampled:
            return
        drawn = chart(finished.timeline)
        root = self._root(drawn, finished)
        stages: dict[tuple[str, int], Span] = {}
        spans: list[tuple[Span, float]] = []
        for stage in drawn.stages:
            span = self._stage(drawn, stage, root)
            stages[(f"{stage.stage}/{stage.replica}", stage.attempt)] = span
            spans.append((span, stage.at + stage.seconds))
        for hop in drawn.hops:
            spans.append((self._hop(drawn, hop, _sender(stages, hop) or root), hop.at + hop.seconds))
        for span, end in spans:
            span.end(_nanoseconds(drawn, end))
        root.end(_nanoseconds(drawn, drawn.seconds))

    def _root(self, drawn: Chart, finished: Finished) -> Span:
        context = None
        if finished.parent_id:
            caller = SpanContext(
                int(drawn.trace_id, 16), int(finished.parent_id, 16), is_remote=True, trace_flags=TraceFlags(1)
            )
            context = set_span_in_context(NonRecordingSpan(caller))
        self._ids.trace_id = int(drawn.trace_id, 16)
        attributes: dict[str, str | int] = {
            "omni.request": drawn.id,
            "omni.outcome": drawn.outcome,
            "omni.attempts": drawn.attempt + 1,
        }
        root = self._tracer.start_span(
            "request", context, SpanKind.SERVER, attributes, start_time=_nanoseconds(drawn, 0.0)
        )
        for mark in drawn.events:
            root.add_event(mark.name, {"detail": mark.detail} if mark.detail else None, _nanoseconds(drawn, mark.at))
        if drawn.outcome != "done":
            root.set_status(Status(StatusCode.ERROR, drawn.outcome))
        return root

    def _stage(self, drawn: Chart, stage: StageBar, root: Span) -> Span:
        span = self._tracer.start_span(
            stage.stage,
            set_span_in_context(root),
            SpanKind.INTERNAL,
            {
                "omni.stage": stage.stage,
                "omni.replica": stage.replica,
                "omni.attempt": stage.attempt,
                "omni.outcome": stage.outcome,
                "omni.input_tokens": stage.input_tokens,
                "omni.output_tokens": stage.output_tokens,
            },
            start_time=_nanoseconds(drawn, stage.at),
        )
        for phase in stage.phases:
            span.add_event(f"end of {phase.name}", None, _nanoseconds(drawn, phase.at + phase.seconds))
        if stage.outcome != "done":
            span.set_status(Status(StatusCode.ERROR, stage.outcome))
        return span

    def _hop(self, drawn: Chart, hop: HopBar, parent: Span) -> Span:
        return self._tracer.start_span(
            f"{hop.source} to {hop.target}",
            set_span_in_context(parent),
            SpanKind.PRODUCER,
            {
                "omni.source": hop.source,
                "omni.target": hop.target,
                "omni.messages": hop.messages,
                "omni.bytes": hop.bytes,
                "omni.first_latency": hop.first_latency,
            },
            start_time=_nanoseconds(drawn, hop.at),
        )

    def close(self) -> None:
        """Send what is queued, for two seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _sender(stages: Mapping[tuple[str, int], Span], hop: HopBar) -> Span | None:
    """The span of the attempt that sent: the newest one up to the receiver's. A sender that went on is at an older."""
    attempts = [attempt for source, attempt in stages if source == hop.source and attempt <= hop.attempt]
    return stages[(hop.source, max(attempts))] if attempts else None


def _nanoseconds(drawn: Chart, at: float) -> int:
    """Unix time; the start alone is 1e18, more than a float can hold exactly."""
    return int(drawn.started * 1e6) * 1000 + int(at * 1e9)
