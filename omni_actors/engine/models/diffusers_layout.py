"""Weights of checkpoints as tensors, and the layout of diffusers: `model_index.json`, and a folder for each part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import cached_file

from omni_actors.config.checkpoint import HINT, read_json_object
from omni_actors.errors import ConfigError, StartupError


def read_tensors(model: str, prefix: str, folder: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors whose names start with `prefix`, under their names without it. Shards without such tensors stay closed.

    Args:
        model: folder or hub name of the checkpoint.
        folder: of the checkpoint, where the files are.

    Raises:
        StartupError: a shard is missing, or no tensor has this prefix.
    """
    within = f"{folder}/" if folder else ""
    index_file = cached_file(
        model, f"{within}model.safetensors.index.json", _raise_exceptions_for_missing_entries=False
    )
    if index_file is not None:
        with open(index_file, encoding="utf-8") as file:
            weight_map: dict[str, str] = json.load(file)["weight_map"]
        shards = sorted({shard for name, shard in weight_map.items() if name.startswith(prefix)})
    else:
        shards = ["model.safetensors"]
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
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                yield name, file.get_tensor(name)
