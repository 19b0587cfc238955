"""Checks what stands below `engine:` in the YAML, for `--check`: starts nothing, needs no GPU and no weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from omni_actors.config import PipelineConfig, StageConfig, StageKind, host_devices, resolve_class
from omni_actors.config.checkpoint import models_of
from omni_actors.errors import ConfigError
from omni_actors.stage.echo import EchoEngine
from omni_actors.stage.engine_interface import StageEngine
from omni_actors.vllm_version import Platform, check_installed, find_installed


def check_engines(pipeline: PipelineConfig) -> list[str]:
    """Check the engine options of every stage; returns a line for each group of stages that says what was checked.

    Imports vLLM if a stage runs in it, which takes about ten seconds.

    Raises:
        ConfigError: an option is unknown, of the wrong type or refused by vLLM; with its dotted path.
    """
    checked, notes = [], []
    models = [stage for stage in pipeline.stages if stage.kind not in (StageKind.ECHO, StageKind.CUSTOM)]
    for stage in pipeline.stages:
        if stage not in models:
            if _engine_class(stage).check_options(stage):
                checked.append(stage.name)
            elif stage.engine:
                notes.append(f"not checked: stages.{stage.name}.engine, as {stage.engine_class} has no check_options")
    if models:
        how = _check_models(pipeline, models)
        notes.append(f"{how}: {', '.join(stage.name for stage in models)}")
    return ([f"engine options checked: {', '.join(checked)}"] if checked else []) + notes


def _engine_class(stage: StageConfig) -> type[StageEngine]:
    if stage.kind is StageKind.ECHO:
        return EchoEngine
    where = f"stages.{stage.name}.engine_class"
    return cast(type[StageEngine], resolve_class(stage.engine_class or "", {}, StageEngine, where))


def _check_models(pipeline: PipelineConfig, stages: Sequence[StageConfig]) -> str:
    """Check the stages that run in vLLM; returns what was checked and what was not."""
    try:
        find_installed()
    except ConfigError:
        return "engine options not checked, as vLLM is not installed"
    platform = check_installed().platform
    logging.getLogger("vllm").setLevel(logging.WARNING)
    from omni_actors.engine.factory import check_arguments

    has_device = platform is Platform.CPU or host_devices() > 0
    elsewhere = [model for model in models_of(pipeline) if not Path(model).is_dir()]
    check_arguments(pipeline, stages, with_checkpoint=has_device and not elsewhere)
    if has_device and not elsewhere:
        return "engine options checked with vLLM and the checkpoint"
    missing = f"{elsewhere[0]} is not a local folder" if elsewhere else "this host has no GPU"
    return f"engine options checked by name and type only, as {missing}"
