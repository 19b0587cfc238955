"""Which checkpoint each stage runs: its own, or the pipeline's."""

from __future__ import annotations

from omni_actors.config.schema import PipelineConfig, StageConfig, StageKind
from omni_actors.errors import ConfigError

# Those whose engines use vLLM.
MODEL_KINDS = (StageKind.PROMPT, StageKind.AUTOREGRESSIVE, StageKind.ENCODER, StageKind.DIFFUSION)


def model_of(pipeline: PipelineConfig, stage: StageConfig) -> str:
    """The checkpoint of a stage. A prompt stage without one has that of the stage that it prepares prompts for."""
    if stage.model is None and stage.kind is StageKind.PROMPT:
        for name in pipeline.downstream(stage.name):
            return pipeline.stage(name).model or pipeline.model
    return stage.model or pipeline.model


def models_of(pipeline: PipelineConfig) -> tuple[str, ...]:
    """The checkpoints that the stages of a pipeline run, each once."""
    return tuple(dict.fromkeys(model_of(pipeline, stage) for stage in pipeline.stages if stage.kind in MODEL_KINDS))


def check_models(pipeline: PipelineConfig) -> None:
    """Check who has a checkpoint of its own, and that prompts are made for the checkpoint that takes them.

    Raises:
        ConfigError: a stage without a checkpoint names one, or a prompt stage has another than the stages after it.
    """
    for stage in pipeline.stages:
        if stage.model is not None and stage.kind not in MODEL_KINDS:
            raise ConfigError(f"stages.{stage.name}.model does not apply to a stage of kind {stage.kind}.")
        if stage.kind is not StageKind.PROMPT:
            continue
        own = model_of(pipeline, stage)
        takers = [pipeline.stage(name) for name in pipeline.downstream(stage.name)]
        for taker in takers:
            if taker.kind in MODEL_KINDS and (other := model_of(pipeline, taker)) != own:
                raise ConfigError(
                    f"stages.{stage.name}.model is {own!r}, but the stage {taker.name!r}, which it prepares prompts "
                    f"for, has {other!r}.",
                    hint="Leave out the prompt stage's model; it takes that of the stage after it.",
                )
