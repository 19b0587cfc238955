"""Published weights and configurations of a diffusion transformer, as ours keeps them, and its LoRA adapters."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from omni_actors.engine.models.diffusion_layers import AdaptedLinear
from omni_actors.errors import ConfigError

if TYPE_CHECKING:
    from omni_actors.engine.models.pictures.denoising import PackedNetwork

# Of adapters as diffusers saves them.
FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
METADATA = "lora_adapter_metadata"
UNSUPPORTED = ("alpha_pattern", "rank_pattern", "use_rslora", "use_dora")


class PartConfig:
    """The configuration of a part of one class.

    Args:
        part: its name, for errors.
        config: the content of its config.json.
        class_name: the class of diffusers that it has to be of.

    Raises:
        ConfigError: it is of another class.
    """

    def __init__(self, part: str, config: Mapping[str, Any], class_name: str) -> None:
        self._part, self._config = part, config
        if (name := config.get("_class_name")) != class_name:
            raise ConfigError(f"The checkpoint's {part} is {name!r}, not {class_name}.")

    def expect(self, **values: Any) -> None:
        """Raise `ConfigError` if one of these keys is there with another value."""
        for key, value in values.items():
            if self._config.get(key, value) != value:
                raise ConfigError(
                    f"The checkpoint's {self._part} has {key} {self._config[key]!r}; only {value!r} is supported."
                )

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or what holds where it is missing."""
        return self._config.get(key, default)

    def __getitem__(self, key: str) -> Any:
        """A value. Raises `ConfigError` if it is missing."""
        try:
            return self._config[key]
        except KeyError as error:
            raise ConfigError(f"The config.json of the checkpoint's {self._part} has no {error}.") from error


@dataclass(frozen=True)
class Names:
    """How published names of parameters become ours.

    Args:
        model: its name, for errors.
        parts: what of a published name becomes what of ours, as which part of how many.
        patterns: regular expressions for names, with what replaces each.
    """

    model: str
    parts: Mapping[str, tuple[str, int, int]]
    patterns: Sequence[tuple[str, str]]

    def place(self, name: str) -> tuple[str, int, int]:
        """Our name of a published parameter, which part of that it is, and of how many."""
        place = 0, 1
        for published, (ours, *which) in self.parts.items():
            if published in name:
                name, place = name.replace(published, ours), (which[0], which[1])
        for pattern, replacement in self.patterns:
            name = re.sub(pattern, replacement, name)
        return name, *place

    def parts_of(self, name: str) -> int:
        """How many published parameters one of ours is made of."""
        return next((parts for ours, _, parts in self.parts.values() if ours in name), 1)


def fused(ours: str, *published: str) -> dict[str, tuple[str, int, int]]:
    """The parts of a matrix that is kept as one, for `Names.parts`."""
    return {name: (ours, index, len(published)) for index, name in enumerate(published)}


@torch.no_grad()
def load(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], names: Names) -> None:
    """Copy published weights into `model`.

    Raises:
        ConfigError: a parameter is missing, unknown, or of another shape than the configuration says.
    """
    parameters = dict(model.named_parameters())
    missing = {(name, part) for name in parameters for part in range(names.parts_of(name))}
    for published, value in weights:
        name, part, parts = names.place(published)
        if (name, part) not in missing:
            raise ConfigError(
                f"The checkpoint's transformer has a parameter {published!r} that {names.model} has not, or has it "
                "twice."
            )
        target = parameters[name].chunk(parts)[part]
        if target.shape != value.shape:
            raise ConfigError(
                f"The checkpoint's parameter {published!r} has the shape {list(value.shape)}; its config.json says "
                f"{list(target.shape)}."
            )
        target.copy_(value)
        missing.remove((name, part))
    if missing:
        lacking = sorted(f"{name} (part {part})" for name, part in missing)
        raise ConfigError(
            f"The checkpoint's transformer lacks {len(lacking)} parameters, the first is {lacking[0]}.",
            hint="Download it again: a part of its files is missing.",
        )


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
                raise ConfigError(f"adapters.{name}: {published} cannot be adapted in {network.names.model}.")
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
