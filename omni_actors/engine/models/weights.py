"""Reading tensors from the safetensors files of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from safetensors import safe_open
from transformers.utils import cached_file

from omni_actors.errors import StartupError


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
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if name.startswith(prefix):
                    found = True
                    yield name.removeprefix(prefix), file.get_tensor(name)
    if not found:
        raise StartupError(f"The checkpoint {model!r} has no tensor {prefix}*.", hint="Use a full Omni checkpoint.")
