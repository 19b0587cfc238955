"""Timelines as OpenTelemetry spans, sent to a collector. Needs the extra `trace`; imported only when it is switched on.

The coordinator makes the spans from a request's timeline once the request has ended, so stages do no more for a traced
request than for any other. A request's span is a child of the caller's (`traceparent`), a stage's is a child of the
request's, a transfer's is a child of the sending stage's.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

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
from omni_actors.protocol.fields import ATTEMPTS
from omni_actors.telemetry.request_log import ObservedRequest
from omni_actors.telemetry.timeline import (
    end_of,
    extent,
    phases,
    replica_name,
    stage_facts,
    stages,
    transfer_facts,
    transfers,
)

CLOSE_SECONDS = 2.0  # for the last spans; the library itself would wait for half a minute


class _GivenIds(RandomIdGenerator):
    """Uses the trace id of the request's timeline for its spans."""

    trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id or super().generate_trace_id()


class OtlpExporter:
    """Sends spans from its own thread. If the collector is slow or away, spans are dropped and nothing waits.

    Args:
        pipeline: becomes the service's name.
        exporter: sends the spans.
    """

    def __init__(self, pipeline: str, exporter: SpanExporter) -> None:
        self._ids = _GivenIds()
        resource = Resource.create({SERVICE_NAME: f"omni_actors/{pipeline}", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("omni_actors", __version__)

    @classmethod
    def connect(cls, pipeline: str, endpoint: str, protocol: OtlpProtocol) -> OtlpExporter:
        """Export to a collector; the standard variables set headers, certificates and timeouts.

        Raises:
            ImportError: the exporter for this protocol is not installed.
        """
        exporter: SpanExporter
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            exporter = GrpcExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            exporter = HttpExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        return cls(pipeline, exporter)

    def export(self, finished: ObservedRequest) -> None:
        """Queue the spans of one request without waiting."""
        if not finished.sampled:
            return
        timeline = finished.timeline
        began, ended = extent(timeline)
        self._ids.trace_id = int(timeline.trace_id, 16)
        caller = None
        if finished.parent_id:
            flags = TraceFlags(TraceFlags.SAMPLED)
            context = SpanContext(self._ids.trace_id, int(finished.parent_id, 16), is_remote=True, trace_flags=flags)
            caller = NonRecordingSpan(context)
        facts = {
            "request": timeline.request_id,
            "outcome": timeline.outcome,
            "attempts": timeline.attempt % ATTEMPTS + 1,
        }
        request = self._start("request", caller, SpanKind.SERVER, began, facts)
        for event in timeline.events:
            request.add_event(event.name, {"detail": event.detail} if event.detail else None, _nanoseconds(event.time))
        spans: dict[tuple[str, int], Span] = {}
        for stage in stages(timeline):
            span = self._start(stage.stage, request, SpanKind.INTERNAL, stage.expected, stage_facts(stage))
            for phase in phases(stage):
                span.add_event(f"end of {phase.name}", None, _nanoseconds(phase.end))
            span.end(_nanoseconds(end_of(stage)))
            spans[(replica_name(stage), stage.attempt)] = span
        for sent in transfers(timeline):
            # The sender's newest attempt up to the receiver's: one that went on after a replay is still at an older.
            attempts = [attempt for name, attempt in spans if name == sent.source and attempt <= sent.attempt]
            sender = spans[(sent.source, max(attempts))] if attempts else request
            name = f"{sent.source} to {sent.target}"
            span = self._start(name, sender, SpanKind.PRODUCER, sent.begin, transfer_facts(sent))
            span.end(_nanoseconds(sent.end))
        request.end(_nanoseconds(ended))

    def _start(self, name: str, parent: Span | None, kind: SpanKind, began: float, facts: Mapping[str, Any]) -> Span:
        context = set_span_in_context(parent) if parent is not None else None
        attributes = {f"omni.{key}": fact for key, fact in facts.items()}
        span = self._tracer.start_span(name, context, kind, attributes, start_time=_nanoseconds(began))
        if facts.get("outcome", "done") != "done":
            span.set_status(Status(StatusCode.ERROR, facts["outcome"]))
        return span

    def close(self) -> None:
        """Send what is queued, for two seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _nanoseconds(moment: float) -> int:
    """Unix time to the microsecond: a float holds no more."""
    return round(moment * 1e6) * 1000
