"""Builds the engine of a stage from its configuration."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence

import msgspec

from omni_actors.config import PipelineConfig, StageConfig, StageKind
from omni_actors.config.checkpoint import model_of
from omni_actors.config.checks import adapted_stages
from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.models import ModelKind, load_plugins
from omni_actors.stage.engine_interface import StageEngine
from omni_actors.stage.start_phases import phase

ENGINE_KINDS: dict[StageKind, ModelKind] = {
    StageKind.PROMPT: "prompt",
    StageKind.AUTOREGRESSIVE: "autoregressive",
    StageKind.ENCODER: "encoder",
    StageKind.DIFFUSION: "diffusion",
}
# vLLM and Triton have separate code for one request, for few, and for multiples of 16.
WARM_UP_BATCHES = (1, 2, 9, 16, 17)


def build_stage_engine(pipeline: PipelineConfig, stage: StageConfig, report: Callable[[str], None]) -> StageEngine:
    """The engine of a pipeline's stage.

    Args:
        report: called with the start-up phase.
    """
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # vLLM then logs through our handlers (logs.py), in one format
    if threads := os.environ.get("OMP_NUM_THREADS"):
        # The fork server has read the variable already; this process may have another share of the cores.
        import torch

        torch.set_num_threads(int(threads))
    load_plugins(pipeline.plugins)
    report(f"loading {stage.part}")
    return build_engine(stage_arguments(pipeline, stage))


def stage_arguments(pipeline: PipelineConfig, stage: StageConfig) -> OmniEngineArgs:
    """Engine arguments of a stage. The prompt stage also has those of the stage that it prepares prompts for."""
    engine = dict(stage.engine)
    if stage.kind is StageKind.PROMPT:
        for name in pipeline.downstream(stage.name):
            engine = {**pipeline.stage(name).engine, **engine}
    model = OmniModelConfig(
        model=model_of(pipeline, stage),
        model_stage=stage.part,
        row_budget_bytes=stage.budget_bytes,
        latent_budget_bytes=stage.budget_bytes,
        row_cache_bytes=stage.row_cache_bytes,
        steps_per_schedule=stage.steps_per_schedule,
        decode=msgspec.to_builtins(stage.decode) if stage.decode is not None else {},
        adapters=dict(pipeline.adapters) if stage.name in adapted_stages(pipeline) else {},
        instruction=stage.instruction or "",
        tool_call_parser=pipeline.tool_call_parser,
        tool_chat_template=pipeline.tool_chat_template,
    )
    return OmniEngineArgs(
        model, ENGINE_KINDS[stage.kind], engine, where=f"stages.{stage.name}.engine", executor=stage.executor
    )


def check_arguments(pipeline: PipelineConfig, stages: Sequence[StageConfig], *, with_checkpoint: bool) -> None:
    """Check the engine arguments of stages without loading a model.

    Args:
        with_checkpoint: also let vLLM build its configuration, which reads the checkpoint's and needs its platform.

    Raises:
        ConfigError: an argument is unknown, of the wrong type or refused by vLLM; with its dotted path.
    """
    for stage in stages:  # first each one's own: the prompt stage has arguments of the stage after it, too
        OmniEngineArgs(
            OmniModelConfig(model_of(pipeline, stage), stage.part),
            ENGINE_KINDS[stage.kind],
            stage.engine,
            where=f"stages.{stage.name}.engine",
        ).check()
    load_plugins(pipeline.plugins)
    for stage in stages if with_checkpoint else ():
        stage_arguments(pipeline, stage).create_engine_config()


def build_engine(arguments: OmniEngineArgs) -> StageEngine:
    """The engine for `arguments`, loaded and warmed up.

    Raises:
        ConfigError: the arguments are wrong.
        StartupError: the model does not load or the core does not start.
    """
    # vLLM runs the garbage collector eight times while it starts; without this each pass scans every import (0.3 s).
    gc.freeze()
    # The engines are imported here, so that a process loads only the one it runs.
    if arguments.kind == "prompt":
        from omni_actors.engine.prompt import PromptEngine

        return PromptEngine(arguments)
    if arguments.kind == "diffusion":
        from omni_actors.engine.diffusion import DiffusionEngine

        return DiffusionEngine(arguments)
    if arguments.kind == "encoder":
        from omni_actors.engine.encoder import EncoderEngine

        encoder = EncoderEngine(arguments)
        with phase("warm-up"):
            encoder.warm_up()
        return encoder
    from omni_actors.engine.autoregressive import AutoregressiveEngine

    engine = AutoregressiveEngine(arguments)
    # Nothing is compiled on the CPU; one request is enough to make a model that cannot run fail at the start.
    most = engine.core.vllm_config.scheduler_config.max_num_seqs
    cuda = engine.core.vllm_config.device_config.device_type == "cuda"
    with phase("warm-up"):
        engine.warm_up([size for size in WARM_UP_BATCHES if size <= most] if cuda else [1])
    return engine
