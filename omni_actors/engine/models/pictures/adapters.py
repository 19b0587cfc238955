"""LoRA adapters of picture models, as diffusers saves them, in the packed batch."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from omni_actors.engine.models.diffusion_layers import AdaptedLinear
from omni_actors.engine.models.pictures.denoising import PackedNetwork
from omni_actors.errors import ConfigError

FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
METADATA = "lora_adapter_metadata"
UNSUPPORTED = ("alpha_pattern", "rank_pattern", "use_rslora", "use_dora")


def load_adapters(network: PackedNetwork, folders: Mapping[str, str]) -> None:
    """Give a network its adapters, folders by name.

    Raises:
        ConfigError: a folder holds none, or one that changes other parts than the products of layers.
    """
    changes: dict[AdaptedLinear, list[tuple[int, int, int, torch.Tensor, torch.Tensor]]] = defaultdict(list)
    modules = dict(network.named_modules())
    for number, (name, folder) in enumerate(folders.items()):
        for published, down, up in _matrices(name, Path(folder)):
            ours, part, parts = network.names.place(f"{published}.weight")
            module = modules.get(ours.removesuffix(".weight"))
            if not isinstance(module, AdaptedLinear) or down.shape[1] != module.in_features:
                raise ConfigError(f"adapters.{name}: {published} cannot be adapted in {network.model}.")
            changes[module].append((number, part, parts, down, up))
    for module, own in changes.items():
        ups, begin = torch.zeros(module.out_features, sum(len(down) for *_, down, _ in own)), 0
        for _, part, parts, down, up in own:
            ups.chunk(parts)[part][:, begin : begin + len(down)] = up
            begin += len(down)
        numbers = [number for number, _, _, down, _ in own for _ in down]
        module.adapter_of = torch.tensor(numbers, device=module.weight.device)
        module.down = torch.cat([down for *_, down, _ in own]).to(module.weight)
        module.up = ups.to(module.weight)
    network.adapters = tuple(folders)


def _matrices(name: str, folder: Path) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """What an adapter changes, by published name: f32 [rank, in] and [out, rank], of which the latter is scaled."""
    try:
        with safe_open(folder / FILE, framework="pt") as file:
            tensors = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118 - not a mapping
            written = json.loads((file.metadata() or {}).get(METADATA, "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(
            f"adapters.{name}: {folder} holds no LoRA adapter: {error}.",
            hint=f"Name the folder with {FILE}, as diffusers' save_lora_weights writes it.",
        ) from error
    if odd := [key for key in UNSUPPORTED if written.get(PREFIX + key)]:
        raise ConfigError(f"adapters.{name} has {odd[0]}, which is not supported.")
    for key, down in tensors.items():
        if not key.startswith(PREFIX) or not key.endswith((DOWN, UP)):
            raise ConfigError(f"adapters.{name}: {key} is no matrix of a LoRA adapter of the transformer.")
        if key.endswith(DOWN):
            up = tensors.get(key.replace(DOWN, UP))
            if up is None or up.shape[1] != len(down):
                raise ConfigError(f"adapters.{name}: {key} lacks its second matrix.")
            scale = written.get(f"{PREFIX}lora_alpha", len(down)) / len(down)
            yield key.removeprefix(PREFIX).removesuffix(DOWN), down, up * scale
