"""Published weights and configurations of a diffusion transformer, as ours keeps them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from omni_actors.errors import ConfigError


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
