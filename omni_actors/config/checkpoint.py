"""Which checkpoint each stage runs, and its config.json, which a user may have cut off or written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omni_actors.config.schema import PipelineConfig, StageConfig, StageKind
from omni_actors.errors import ConfigError
from omni_actors.host.run_directory import check_readable

CONFIG_NAME = "config.json"
INDEX_NAME = "model_index.json"  # of a checkpoint with a folder for each part, as diffusers writes it
MAX_BYTES = 16 << 20
HINT = "Compare it with the config.json of the published checkpoint, or download that again."


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file of a checkpoint.

    Raises:
        ConfigError: it cannot be read, is too large or is no JSON object.
    """
    size = check_readable(path, "model")
    if size > MAX_BYTES:
        raise ConfigError(f"{path} has {size} bytes, more than {MAX_BYTES >> 20} MiB.", hint=HINT)
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # RecursionError: ten thousand levels
        raise ConfigError(f"{path} is not valid JSON: {error}.", hint=HINT) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object; it holds a {type(config).__name__}.", hint=HINT)
    return config


def read_checkpoint_config(path: Path) -> dict[str, Any]:
    """Read a config.json.

    Raises:
        ConfigError: as in `read_json_object`, and if it does not name one architecture.
    """
    config = read_json_object(path)
    names = config.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise ConfigError(f"{path} must name one architecture in a list; `architectures` is {names!r}.", hint=HINT)
    for key, value in config.items():
        if key.endswith("_config") and value is not None and not isinstance(value, dict):
            raise ConfigError(f"{path}: {key} must be an object; it is a {type(value).__name__}.", hint=HINT)
    return config


def checkpoint_class(folder: Path) -> str:
    """The architecture of a checkpoint, or the class of its pipeline if it has a folder for each part.

    Raises:
        ConfigError: config.json or model_index.json cannot be read, or does not name one.
    """
    if not (folder / INDEX_NAME).exists():
        return str(read_checkpoint_config(folder / CONFIG_NAME)["architectures"][0])
    name = read_json_object(folder / INDEX_NAME).get("_class_name")
    if not isinstance(name, str):
        raise ConfigError(
            f"{folder / INDEX_NAME} must name the pipeline's class; `_class_name` is {name!r}.", hint=HINT
        )
    return name


# Those whose engines use vLLM, and those that have a checkpoint.
VLLM_KINDS = (StageKind.PROMPT, StageKind.AUTOREGRESSIVE, StageKind.ENCODER, StageKind.DIFFUSION)
MODEL_KINDS = (*VLLM_KINDS, StageKind.DIFFUSERS)


def model_of(pipeline: PipelineConfig, stage: StageConfig) -> str:
    """The checkpoint of a stage. A prompt stage without one has that of the stage that it prepares prompts for."""
    if stage.model is None and stage.kind is StageKind.PROMPT:
        for name in pipeline.prompted(stage.name):
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
        takers = [pipeline.stage(name) for name in pipeline.prompted(stage.name)]
        for taker in takers:
            if taker.kind in MODEL_KINDS and (other := model_of(pipeline, taker)) != own:
                raise ConfigError(
                    f"stages.{stage.name}.model is {own!r}, but the stage {taker.name!r}, which it prepares prompts "
                    f"for, has {other!r}.",
                    hint="Leave out the prompt stage's model; it takes that of the stage after it.",
                )
