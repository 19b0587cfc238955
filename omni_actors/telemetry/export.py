"""Whether spans are exported, and how: the only module that loads OpenTelemetry, and only if it is switched on."""

from __future__ import annotations

from omni_actors.config import PipelineConfig
from omni_actors.errors import ConfigError
from omni_actors.telemetry.collector import Exporter

INSTALL_HINT = "pip install 'omni_actors[trace]'"


def span_export(pipeline: PipelineConfig) -> Exporter | None:
    """Where spans go. Raises `ConfigError` if they should go somewhere, and what that takes is not installed."""
    coordinator = pipeline.coordinator
    if coordinator.otlp_endpoint is None:
        return None
    try:
        from omni_actors.telemetry.otlp import SpanExport
    except ImportError as error:
        raise ConfigError(
            f"coordinator.otlp_endpoint is set, and OpenTelemetry is not installed: {error}.",
            hint=f"{INSTALL_HINT}, or unset OTEL_EXPORTER_OTLP_ENDPOINT.",
        ) from error
    return SpanExport.to(pipeline.name, coordinator.otlp_endpoint, coordinator.otlp_protocol)
