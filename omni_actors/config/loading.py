"""Loads the pipeline's YAML: strictly, checked before anything starts, with the source of every value.

Precedence: command line > environment > SLURM > YAML > default. Unknown keys, cycles of stages, missing stages and
missing devices are errors; the one for an unknown key names the nearest valid key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from omni_actors import envs
from omni_actors.config import slurm
from omni_actors.config.checks import check_pipeline
from omni_actors.config.devices import host_devices
from omni_actors.config.dotted_keys import flatten, refuse_unknown_keys, suggest
from omni_actors.config.schema import PipelineConfig, StageConfig
from omni_actors.errors import ConfigError


class LoadedConfig(NamedTuple):
    """A checked pipeline and the source of each of its values, by dotted key."""

    pipeline: PipelineConfig
    sources: dict[str, str]
    path: Path


def load(path: str | Path, overrides: Mapping[str, str] | None = None, devices: int | None = None) -> LoadedConfig:
    """Read a pipeline, apply overrides and check it.

    Args:
        path: the YAML file.
        overrides: command-line values by dotted key, for instance `{"stages.thinker.engine.max_num_seqs": "8"}`.
        devices: number of GPUs of this host; `None` counts them.

    Raises:
        ConfigError: anything is wrong; it names the key and, for an unknown one, the nearest valid key.
    """
    path = Path(path)
    data = _read_yaml(path)
    sources = {key: f"yaml {path.name}" for key in flatten(data)}
    from_env = envs.config_overrides()
    for key, (value, variable) in slurm.config_overrides(known={*from_env, *(overrides or {})}).items():
        _set_value(data, key, value, sources, f"SLURM {variable}")
    for key, (value, variable) in from_env.items():
        _set_value(data, key, value, sources, f"env {variable}")
    for key, value in (overrides or {}).items():
        _set_value(data, key, value, sources, "command line")
    if data.get("mps") is False:
        data["mps"] = "off"  # which YAML reads as false
    refuse_unknown_keys(data, PipelineConfig, "")
    try:
        pipeline = msgspec.convert(data, PipelineConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path.name}: {error}.") from error
    pipeline = msgspec.structs.replace(
        pipeline, model=_resolve_model(pipeline.model, path.parent), stages=_in_graph_order(pipeline.stages)
    )
    if pipeline.coordinator.keys_dir is not None:
        from_yaml = sources.get("coordinator.keys_dir", "").startswith("yaml")
        folder = (path.parent if from_yaml else Path()) / Path(pipeline.coordinator.keys_dir).expanduser()
        coordinator = msgspec.structs.replace(pipeline.coordinator, keys_dir=str(folder.absolute()))
        pipeline = msgspec.structs.replace(pipeline, coordinator=coordinator)
    check_pipeline(pipeline, host_devices() if devices is None else devices)
    return LoadedConfig(pipeline, sources, path)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"Cannot read the pipeline file {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping with the keys name, model and stages.")
    return data


class _UniqueKeyLoader(yaml.SafeLoader):
    """A SafeLoader that refuses a repeated key instead of silently taking the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _set_value(data: dict[str, Any], key: str, text: str, sources: dict[str, str], source: str) -> None:
    """Set the dotted `key` to `text`, read as YAML. Stages are addressed by name: `stages.thinker.replicas`."""
    node: Any = data
    parts = key.split(".")
    for index, part in enumerate(parts[:-1]):
        if isinstance(node, list):
            node = _stage_by_name(node, part, key)
        elif isinstance(node, dict):
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        else:
            raise ConfigError(f"{source}: {'.'.join(parts[: index + 1])!r} is not a mapping, so {key!r} cannot be set.")
    if not isinstance(node, dict):
        raise ConfigError(f"{source}: {key!r} does not name a value.")
    try:
        node[parts[-1]] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: the value {text!r} of {key!r} is not valid YAML.") from error
    for old in [old for old in sources if old == key or old.startswith(f"{key}.")]:
        del sources[old]
    sources[key] = source


def _stage_by_name(stages: list[Any], name: str, key: str) -> Any:
    names = [stage.get("name") for stage in stages if isinstance(stage, dict)]
    if name not in names:
        raise ConfigError(f"{key!r}: there is no stage {name!r}.{suggest(name, [str(known) for known in names])}")
    return next(stage for stage in stages if isinstance(stage, dict) and stage.get("name") == name)


def _resolve_model(model: str, base: Path) -> str:
    """Resolve a path relative to the YAML file or the current folder; anything else is taken for a hub name."""
    candidate = Path(model).expanduser()
    for folder in (base / candidate, candidate):
        if folder.is_dir():
            return str(folder.resolve())
    if model.startswith((".", "/", "~")):
        raise ConfigError(
            f"model: there is no folder {model!r} (looked next to the YAML file and in the current folder).",
            hint="Give the folder of a checkpoint, or make a tiny one: python -m tools.checkpoints tiny DIR.",
        )
    return model


def _in_graph_order(stages: Sequence[StageConfig]) -> list[StageConfig]:
    """Order the stages, each after its sources. Raises `ConfigError` for repeated or missing names and for cycles."""
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"Two stages are called {name!r}; stage names must differ.")
    for stage in stages:
        for source in stage.source_names:
            if source not in names:
                raise ConfigError(
                    f"stages.{stage.name}.inputs.from: there is no stage {source!r}.{suggest(source, names)}"
                )
    ordered: list[StageConfig] = []
    remaining = list(stages)
    while remaining:
        done = {stage.name for stage in ordered}
        ready = [stage for stage in remaining if set(stage.source_names) <= done]
        if not ready:
            cycle = ", ".join(stage.name for stage in remaining)
            raise ConfigError(f"The stages {cycle} wait for one another: the inputs form a cycle.")
        ordered += ready
        remaining = [stage for stage in remaining if stage not in ready]
    return ordered
