"""Weights of checkpoints, and the layout of diffusers: `model_index.json`, and a folder for each part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
        with safe_open(checkpoint_file(model, within + shard), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                if name.startswith(prefix):
                    found = True
                    yield name.removeprefix(prefix), file.get_tensor(name)
    if not found:
        raise StartupError(f"The checkpoint {model!r} has no tensor {prefix}*.", hint="Use a full Omni checkpoint.")


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


# What diffusers calls parts that several of its transformers have, and what ours do.
COMMON_NAMES = (
    (r"^transformer_blocks\.", "layers."),
    (r"^time_\w+\.timestep_embedder\.linear_1\.", "moment.inner."),
    (r"^time_\w+\.timestep_embedder\.linear_2\.", "moment.outer."),
    (r"^norm_out\.linear\.", "final_modulation."),
    (r"^proj_out\.", "final."),
    (r"\.att\w+\.to_out\.0\.", ".out."),
    (r"\.att\w+\.(norm_[qk])\.", r".\1."),
)


@dataclass(frozen=True)
class Names:
    """How published names of parameters become ours.

    Args:
        parts: what of a published name becomes what of ours, as which part of how many.
        patterns: regular expressions for names, with what replaces each.
    """

    parts: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)
    patterns: Sequence[tuple[str, str]] = ()

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
def fill(module: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], what: str, names: Names = Names()) -> None:
    """Copy the published weights of `what`, as errors call it, into a module.

    Raises:
        StartupError: one is missing, unknown, there twice, or of another shape than the configuration says.
    """
    targets = module.state_dict()
    missing = {(name, part) for name in targets for part in range(names.parts_of(name))}
    unexpected, misshapen = [], []
    for published, value in weights:
        name, part, parts = names.place(published)
        if (name, part) not in missing:
            unexpected.append(published)
            continue
        missing.remove((name, part))
        target = targets[name].chunk(parts)[part] if parts > 1 else targets[name]
        if target.shape == value.shape:
            target.copy_(value)
        else:
            misshapen.append(published)
    if missing or unexpected or misshapen:
        lacking = sorted(name if names.parts_of(name) == 1 else f"{name} (part {part})" for name, part in missing)
        counts = f"{len(missing)}, {len(unexpected)} and {len(misshapen)} in all"
        raise StartupError(
            f"The weights of {what} do not fit its config: missing {lacking[:3]}, unexpected {sorted(unexpected)[:3]}, "
            f"of another shape {sorted(misshapen)[:3]} ({counts}).",
            hint="Check that config.json and the safetensors files belong together, and download them again.",
        )


@contextmanager
def same_everywhere(device: torch.device | str = "cpu") -> Iterator[None]:
    """While the block runs, modules are made on a device with random weights that are the same in every process.

    A stage that is restarted without a checkpoint's weights goes on with the same sounds and pictures.
    """
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        yield


def checkpoint_file(model: str, name: str) -> Path:
    """A file of a checkpoint with a path or a hub name. Raises `StartupError` if it has none."""
    path = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    if path is None:
        raise StartupError(f"The checkpoint {model!r} has no file {name!r}.", hint="Download it completely.")
    return Path(path)


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
