"""LoRA adapters that are loaded while a pipeline runs: for which stages, and from where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omni_actors.config.schema import PipelineConfig, StageKind
from omni_actors.errors import InvalidRequest


def adapted_stages(pipeline: PipelineConfig) -> tuple[str, ...]:
    """The stages that run adapters: those whose text is an output."""
    kinds = (StageKind.AUTOREGRESSIVE, StageKind.ECHO)
    return tuple(stage.name for stage in pipeline.stages if stage.kind in kinds and "text" in stage.outputs)


def allowed_folder(folder: str, allowed: Sequence[str]) -> Path:
    """The folder without links. Raises `InvalidRequest` if it is none, or lies in no folder that is allowed."""
    given = Path(folder)
    try:
        found = given.resolve()
        inside = given.is_absolute() and any(found.is_relative_to(Path(parent).resolve()) for parent in allowed)
        exists = inside and found.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"{folder!r} cannot be a folder: {error}.", hint="", field="folder") from error
    if not inside:
        raise InvalidRequest(
            f"{folder!r} is in none of the folders from which adapters may be loaded.",
            hint="Give an absolute path in one of the pipeline's adapter_folders.",
            field="folder",
        )
    if not exists:
        raise InvalidRequest(f"There is no folder {folder!r}.", hint="Name one that PEFT has saved.", field="folder")
    return found
