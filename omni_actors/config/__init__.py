"""The pipeline's configuration: its schema, its loading, and the checks before anything starts."""

from __future__ import annotations

from omni_actors.config.checks import check_allowed, check_parameters, resolve_class, unknown_adapter
from omni_actors.config.loading import LoadedConfig, describe, load
from omni_actors.config.placement import host_devices, memory_plan, replica_devices, visible_devices
from omni_actors.config.schema import (
    BUILT_IN_PROCESSORS,
    CoordinatorConfig,
    Executor,
    FlowConfig,
    HttpConfig,
    Modality,
    OtlpProtocol,
    PipelineConfig,
    StageConfig,
    StageKind,
)

__all__ = [
    "BUILT_IN_PROCESSORS",
    "CoordinatorConfig",
    "Executor",
    "FlowConfig",
    "HttpConfig",
    "LoadedConfig",
    "Modality",
    "OtlpProtocol",
    "PipelineConfig",
    "StageConfig",
    "StageKind",
    "check_allowed",
    "check_parameters",
    "describe",
    "host_devices",
    "load",
    "memory_plan",
    "replica_devices",
    "resolve_class",
    "unknown_adapter",
    "visible_devices",
]
