"""Weights of checkpoints as tensors, and the layout of diffusers: `model_index.json`, and a folder for each part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.utils import cached_file

from omni_actors.config.checkpoint import HINT, read_json_object
from omni_actors.errors import ConfigError, StartupError

WEIGHTS = "diffusion_pytorch_model"


def read_tensors(model: str, prefix: str, folder: str = "", stem: str = "model") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors whose names start with `prefix`, under their names without it, on the CPU.

    Shards without such tensors stay closed.

    Args:
        model: folder or hub name of the checkpoint.
        folder: of the checkpoint, where the files are.
        stem: of their names.

    Raises:
        StartupError: a shard is missing, or no tensor has this prefix.
        ConfigError: the index of the shards is damaged.
    """
    within = f"{folder}/" if folder else ""
    shards = [f"{stem}.safetensors"]
    index = cached_file(model, f"{within}{stem}.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is not None:
        weight_map = read_json_object(Path(index)).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{index} has no weight_map.", hint=HINT)
        shards = sorted({shard for name, shard in weight_map.items() if name.startswith(prefix)})
    found = False
    for shard in shards:
        path = cached_file(model, within + shard, _raise_exceptions_for_missing_entries=False)
        if path is None:
            raise StartupError(
                f"The checkpoint {model!r} has no file {within + shard!r}.", hint="Download it completely."
            )
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                if name.startswith(prefix):
                    found = True
                    yield name.removeprefix(prefix), file.get_tensor(name)
    if not found:
        raise StartupError(f"The checkpoint {model!r} has no tensor {prefix}*.", hint="Use a full Omni checkpoint.")


def fill(module: nn.Module, weights: Mapping[str, torch.Tensor], what: str) -> None:
    """Copy all weights of `what`, as errors call it, into a module. Raises `StartupError` if they do not fit."""
    own = module.state_dict()
    missing, unexpected = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    misshapen = sorted(name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape)
    if missing or unexpected or misshapen:
        raise StartupError(
            f"The weights of {what} do not fit its config: missing {missing[:3]}, unexpected {unexpected[:3]}, of "
            f"another shape {misshapen[:3]} ({len(missing)}, {len(unexpected)} and {len(misshapen)} in all).",
            hint="Check that config.json and the safetensors files belong together.",
        )
    module.load_state_dict(weights)


def checkpoint_folder(model: str) -> Path:
    """The folder of a checkpoint; one with a hub name is downloaded, or found in the cache.

    Raises:
        ConfigError: neither works.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model))
    except Exception as error:  # the hub's client raises a dozen kinds, for names, networks and permissions
        raise ConfigError(f"Cannot find the checkpoint {model!r}: {error}") from error


def diffusers_class(name: str) -> Any:
    """A class of diffusers. Raises `StartupError` if that is not installed, or has no such class."""
    try:
        import diffusers

        return getattr(diffusers, name)
    except (ImportError, AttributeError) as error:
        raise StartupError(
            f"This stage needs {name} of diffusers, which is not installed or too old.",
            hint="Run pip install 'omni_actors[image]'.",
        ) from error


def part_folder(folder: Path, part: str) -> Path:
    """The folder of a part. Raises `ConfigError` if it is missing."""
    if not (folder / part).is_dir():
        raise ConfigError(f"The checkpoint {folder} has no folder {part!r}.", hint="Download it completely.")
    return folder / part


def part_config(folder: Path, part: str, name: str = "config.json") -> dict[str, Any]:
    """The configuration of a part.

    Raises:
        ConfigError: the folder or the file is missing, or it is no JSON object.
    """
    return read_json_object(part_folder(folder, part) / name)
