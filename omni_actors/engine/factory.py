"""Builds the engine of a stage from its arguments."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import msgspec

from omni_actors.config import PipelineConfig, StageConfig, StageKind
from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.models import load_plugins
from omni_actors.errors import ConfigError
from omni_actors.stage.engine_interface import StageEngine


def build_stage_engine(pipeline: PipelineConfig, stage: StageConfig, report: Callable[[str], None]) -> StageEngine:
    """The engine of a stage of a pipeline. `report` is told what the start-up does."""
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # its log goes the way of ours (logs.py), in one format
    if threads := os.environ.get("OMP_NUM_THREADS"):
        # The fork server has read the variable already; this process may have another share of the cores.
        import torch

        torch.set_num_threads(int(threads))
    load_plugins(pipeline.plugins)
    report(f"loading {stage.part} of {pipeline.model}")
    return build_engine(stage.kind.value, stage_arguments(pipeline, stage))


def stage_arguments(pipeline: PipelineConfig, stage: StageConfig) -> OmniEngineArgs:
    """Engine arguments of a stage. The prompt stage prepares for the stage after it and has that stage's arguments."""
    engine = dict(stage.engine)
    if stage.kind is StageKind.PROMPT:
        for name in pipeline.downstream(stage.name):
            engine = {**pipeline.stage(name).engine, **engine}
    model = OmniModelConfig(
        model=pipeline.model,
        model_stage=stage.part,
        outputs=tuple(output.value for output in stage.outputs),
        row_budget_bytes=stage.budget_bytes,
        latent_budget_bytes=stage.budget_bytes,
        decode=msgspec.to_builtins(stage.decode) if stage.decode is not None else {},
    )
    return OmniEngineArgs(model, stage.kind.value, engine)


# vLLM and Triton have code for one request, for few, and for multiples of 16.
WARM_UP_BATCHES = (1, 2, 9, 16, 17)


def build_engine(stage_kind: str, arguments: OmniEngineArgs) -> StageEngine:
    """The engine of a stage, loaded and ready.

    Args:
        stage_kind: "autoregressive", "diffusion" or "prompt".

    Raises:
        ConfigError: wrong arguments.
        StartupError: the model does not load or the core does not start.
    """
    builders: dict[str, Callable[[OmniEngineArgs], StageEngine]] = {
        "autoregressive": _autoregressive,
        "diffusion": _diffusion,
        "prompt": _prompt,
    }
    if stage_kind not in builders or stage_kind != arguments.kind:
        raise ConfigError(f"Stage kind {stage_kind!r}, arguments for {arguments.kind!r}; there are {list(builders)}.")
    # vLLM collects garbage eight times while it starts; without this each pass walks everything imported (0.3 s).
    gc.freeze()
    return builders[stage_kind](arguments)


# Imported late, so that a process loads only the engine it runs.


def _autoregressive(arguments: OmniEngineArgs) -> StageEngine:
    from omni_actors.engine.autoregressive import AutoregressiveEngine

    engine = AutoregressiveEngine(arguments)
    # On the CPU nothing is compiled; once through, so that a model that cannot run fails its start and no request.
    most = engine.core.vllm_config.scheduler_config.max_num_seqs
    cuda = engine.core.vllm_config.device_config.device_type == "cuda"
    engine.warm_up([size for size in WARM_UP_BATCHES if size <= most] if cuda else [1])
    return engine


def _diffusion(arguments: OmniEngineArgs) -> StageEngine:
    from omni_actors.engine.diffusion import DiffusionEngine

    return DiffusionEngine(arguments)


def _prompt(arguments: OmniEngineArgs) -> StageEngine:
    from omni_actors.engine.prompt import PromptEngine

    return PromptEngine(arguments)
