"""Edges on which a stage's text becomes another stage's prompt, as in a cascade of models."""

from __future__ import annotations

from omni_actors.config.schema import PipelineConfig, StageConfig, StageKind
from omni_actors.errors import ConfigError

TEXT_PROCESSOR = "text2prompt"
WITH_PROMPTS = (StageKind.PROMPT, StageKind.ECHO, StageKind.CUSTOM)


def takes_text(stage: StageConfig) -> bool:
    """Whether a stage takes the text of the stage before it as its prompt."""
    return stage.inputs is not None and stage.inputs.processor == TEXT_PROCESSOR


def sends_text(pipeline: PipelineConfig, name: str) -> bool:
    """Whether the stages after one take its text, in place of rows and tokens."""
    return any(takes_text(pipeline.stage(follower)) for follower in pipeline.downstream(name))


def check_text_edges(pipeline: PipelineConfig) -> None:
    """Raise `ConfigError` where text cannot become a prompt, and for instructions where there are no prompts."""
    for stage in pipeline.stages:
        where = f"stages.{stage.name}"
        if stage.instruction is not None and stage.kind is not StageKind.PROMPT:
            raise ConfigError(f"{where}.instruction is for stages of kind prompt; this one is of kind {stage.kind}.")
        if stage.kind is StageKind.PROMPT and stage.inputs is not None and not takes_text(stage):
            raise ConfigError(
                f"{where}.inputs.processor must be {TEXT_PROCESSOR!r} for a prompt stage after another stage; it is "
                f"{stage.inputs.processor!r}."
            )
        if takes_text(stage):
            _check_taker(pipeline, stage, where)


def _check_taker(pipeline: PipelineConfig, stage: StageConfig, where: str) -> None:
    if stage.kind not in WITH_PROMPTS:
        raise ConfigError(
            f"{where}.inputs.processor: {TEXT_PROCESSOR!r} makes prompts, and a stage of kind {stage.kind} does not "
            "take any.",
            hint="Put a stage of kind prompt in between.",
        )
    if len(stage.source_names) > 1:
        raise ConfigError(f"{where}.inputs.from: {TEXT_PROCESSOR!r} takes one stage; here: {list(stage.source_names)}.")
    (source,) = stage.source_names
    others = [name for name in pipeline.downstream(source) if not takes_text(pipeline.stage(name))]
    if others:
        raise ConfigError(
            f"{where}.inputs.from: {source!r} sends its text to this stage, so it cannot send rows or tokens to "
            f"{others}.",
            hint="Run the model in a second stage for the one or the other.",
        )
    if pipeline.tool_call_parser is not None:
        raise ConfigError(
            f"tool_call_parser: the calls would be those of the stage before {stage.name!r}, whose text is a prompt.",
            hint="Leave it out; a cascade calls no tools.",
        )
