"""Checkpoints in the layout of diffusers: `model_index.json`, and a folder with configuration and weights per part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from omni_actors.config.checkpoint import HINT, read_json_object
from omni_actors.errors import ConfigError, StartupError

WEIGHTS = "diffusion_pytorch_model"


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


def part_tensors(folder: Path, part: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a part by name, on the CPU.

    Raises:
        StartupError: a file is missing.
        ConfigError: the index of the files is damaged.
    """
    index = folder / part / f"{WEIGHTS}.safetensors.index.json"
    if index.exists():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{index} has no weight_map.", hint=HINT)
        shards = sorted(set(weight_map.values()))
    else:
        shards = [f"{WEIGHTS}.safetensors"]
    for shard in shards:
        path = folder / part / shard
        if not path.exists():
            raise StartupError(f"The checkpoint has no file {path}.", hint="Download it completely.")
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                yield name, file.get_tensor(name)
