"""Modules made of the tensors of a checkpoint: sizes are those of the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from omni_actors.errors import StartupError

GAIN, DIRECTION = "parametrizations.weight.original0", "parametrizations.weight.original1"
Layer = TypeVar("Layer", bound=nn.Module)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file of torch. Raises `StartupError` if it is missing or holds anything else."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler meets
        raise StartupError(f"Cannot read {path}: {error}", hint="Download the checkpoint completely.") from error
    if not isinstance(tensors, dict) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
        raise StartupError(f"{path} holds no tensors by name.", hint="Download the checkpoint again.")
    return tensors


class Weights:
    """Tensors by name; each is taken once. Normalized weights (a gain and a direction) become plain ones.

    Args:
        source: what they are of, for messages.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], source: str) -> None:
        self._source = source
        self._tensors = {name.removeprefix("generator."): tensor for name, tensor in tensors.items()}
        for name in [name for name in self._tensors if name.endswith(GAIN)]:
            stem = name.removesuffix(GAIN)
            gain, direction = self._tensors.pop(name), self.take(stem + DIRECTION)
            self._tensors[f"{stem}weight"] = torch._weight_norm(direction.double(), gain.double(), 0)

    @classmethod
    def read(cls, path: Path) -> Weights:
        """The tensors of a file of torch. Raises `StartupError` if it is missing or holds anything else."""
        return cls(read_tensors(path), str(path))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def count(self, prefix: str) -> int:
        """How many numbers follow a prefix, as in `layers.0.`."""
        return len({name[len(prefix) :].split(".")[0] for name in self._tensors if name.startswith(prefix)})

    def take(self, name: str) -> torch.Tensor:
        """A tensor. Raises `StartupError` if there is none."""
        if name not in self._tensors:
            raise StartupError(f"{self._source} has no tensor {name!r}.", hint="Check that it is of this model.")
        return self._tensors.pop(name)

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor. Raises `StartupError` if there is none."""
        self._tensors[name] = tensor = self.take(name)
        return tensor.shape

    def fill(self, name: str, layer: Layer) -> Layer:
        """Put the tensors of `name` into a layer. Raises `StartupError` if one is missing."""
        for own, parameter in list(layer.named_parameters()):
            setattr(layer, own, nn.Parameter(self.take(f"{name}.{own}").to(parameter.dtype), requires_grad=False))
        return layer

    def linear(self, name: str, dtype: torch.dtype = torch.float32) -> nn.Linear:
        """A linear layer."""
        outputs, inputs = self.shape(f"{name}.weight")
        return self.fill(name, nn.Linear(inputs, outputs, bias=f"{name}.bias" in self, device="meta", dtype=dtype))

    def conv(self, name: str, *, stride: int = 1, dilation: int = 1, dtype: torch.dtype = torch.float32) -> nn.Conv1d:
        """A convolution without padding."""
        outputs, inputs, kernel = self.shape(f"{name}.weight")
        layer = nn.Conv1d(inputs, outputs, kernel, stride, dilation=dilation, device="meta", dtype=dtype)
        return self.fill(name, layer)

    def widening(self, name: str, rate: int) -> nn.ConvTranspose1d:
        """A convolution that makes `rate` positions of each."""
        inputs, outputs, kernel = self.shape(f"{name}.weight")
        layer = nn.ConvTranspose1d(inputs, outputs, kernel, rate, padding=(kernel - rate) // 2, device="meta")
        return self.fill(name, layer)

    def norm(self, name: str, eps: float = 1e-5) -> nn.LayerNorm:
        """A norm of layers."""
        return self.fill(name, nn.LayerNorm(self.shape(f"{name}.weight")[0], eps=eps, device="meta"))

    def done(self) -> None:
        """Raise `StartupError` if tensors are left that nothing has taken."""
        if self._tensors:
            raise StartupError(
                f"{self._source}: nothing takes {sorted(self._tensors)[:3]} ({len(self._tensors)} in all).",
                hint="Check that it is of this model.",
            )
