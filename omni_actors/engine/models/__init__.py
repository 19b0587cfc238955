"""Models: the registry, and a folder for each model family."""

from omni_actors.engine.models.registry import (
    ModelKind,
    ModelSpec,
    PromptMedia,
    SpeechLimit,
    checkpoint_architecture,
    find_model_spec,
    load_plugins,
    prompted_stage,
    register_models,
    renamed,
)

__all__ = [
    "ModelKind",
    "ModelSpec",
    "PromptMedia",
    "SpeechLimit",
    "checkpoint_architecture",
    "find_model_spec",
    "load_plugins",
    "prompted_stage",
    "register_models",
    "renamed",
]
