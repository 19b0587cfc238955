"""The pipeline's configuration: its schema, its loading and the checks before anything starts."""

from __future__ import annotations

from omni_actors.config.classes import check_allowed, check_importable, resolve_class
from omni_actors.config.description import describe
from omni_actors.config.devices import host_devices, memory_plan, replica_devices, stage_devices, visible_devices
from omni_actors.config.dotted_keys import flatten, suggest
from omni_actors.config.loading import LoadedConfig, load
from omni_actors.config.schema import (
    BUILT_IN_IMPORT_PREFIXES,
    BUILT_IN_PROCESSORS,
    PARAMS_BY_KIND,
    ClusterConfig,
    CoordinatorConfig,
    DecodeConfig,
    FlowConfig,
    HttpConfig,
    InputConfig,
    LossPolicy,
    Modality,
    OtlpProtocol,
    PipelineConfig,
    StageConfig,
    StageKind,
)

__all__ = [
    "BUILT_IN_IMPORT_PREFIXES",
    "BUILT_IN_PROCESSORS",
    "PARAMS_BY_KIND",
    "ClusterConfig",
    "CoordinatorConfig",
    "DecodeConfig",
    "FlowConfig",
    "HttpConfig",
    "InputConfig",
    "LoadedConfig",
    "LossPolicy",
    "Modality",
    "OtlpProtocol",
    "PipelineConfig",
    "StageConfig",
    "StageKind",
    "check_allowed",
    "check_importable",
    "describe",
    "flatten",
    "host_devices",
    "load",
    "memory_plan",
    "replica_devices",
    "resolve_class",
    "stage_devices",
    "suggest",
    "visible_devices",
]
