"""Random weights of any size in the shards of a published checkpoint, written as fast as the disk takes them.

Every parameter has the distribution that the tiny checkpoint gives it (`weights.py`), but its values are a piece of one
block of noise: they repeat, which no one notices who measures how weights are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tools.checkpoints.weights import centre, restrict_output, seeded_generator, spread_of

INDEX_FILE = "model.safetensors.index.json"
NOISE_VALUES = 16_777_213  # a prime, so that no two rows of a matrix are the same piece
SHARD_BYTES = 2 << 30
WRITERS = 4  # shards at a time; each is held in memory


def write_random_shards(
    folder: Path,
    config: Any,
    *,
    spoken_ids: Sequence[int],
    sounds: int,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Writes the weights of a model of this configuration, and their index; returns the bytes of all tensors.

    Args:
        spoken_ids: tokens with which the thinker may answer.
        sounds: codec tokens that the vocoder knows, counted from 0; the talker makes no others.
    """
    from transformers import Qwen2_5OmniForConditionalGeneration

    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(config)
    shapes: dict[str, torch.Size] = {name: value.shape for name, value in model.state_dict().items()}
    noise = torch.randn(NOISE_VALUES, generator=seeded_generator(seed, "noise"))
    shards = split(shapes, shard_bytes // dtype.itemsize)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]

    def write(file: str, members: Sequence[str]) -> None:
        tensors = {}
        for name in members:
            value = draw(name, shapes[name], noise, seed, dtype)
            restrict_output(name, value, spoken_ids, sounds)
            tensors[name] = value
        save_file(tensors, folder / file, metadata={"format": "pt"})

    with ThreadPoolExecutor(WRITERS) as writers:
        list(writers.map(write, names, shards))
    total = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
    weight_map = {name: file for file, members in zip(names, shards, strict=True) for name in members}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def split(shapes: Mapping[str, torch.Size], most: int) -> list[list[str]]:
    """Divides parameters, in their order, into shards of at most `most` values; a larger one has its own."""
    shards: list[list[str]] = []
    size = most
    for name, shape in shapes.items():
        if size + shape.numel() > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += shape.numel()
    return shards


def draw(name: str, shape: torch.Size, noise: torch.Tensor, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the value of one parameter: a piece of `noise`, float32 [values], with the parameter's distribution."""
    mean, std = spread_of(name, shape)
    start = seeded_generator(seed, name).initial_seed() % len(noise)
    count = shape.numel()
    if count < len(noise) - start:
        return centre(name, (noise[start : start + count] * std + mean).view(shape)).to(dtype)
    whole = (noise.roll(-start) * std + mean).to(dtype)
    return centre(name, whole.repeat(-(-count // len(noise)))[:count].view(shape))
