"""Builds the engine of a stage from its arguments."""

from __future__ import annotations

import gc
from collections.abc import Callable

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.errors import ConfigError
from omni_actors.stage.interface import StageEngine


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

    return AutoregressiveEngine(arguments)


def _diffusion(arguments: OmniEngineArgs) -> StageEngine:
    from omni_actors.engine.diffusion import DiffusionEngine

    return DiffusionEngine(arguments)


def _prompt(arguments: OmniEngineArgs) -> StageEngine:
    from omni_actors.engine.prompt import PromptEngine

    return PromptEngine(arguments)
