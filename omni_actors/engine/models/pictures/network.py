"""What a diffusion transformer for packed batches offers to the rest of a denoising stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from omni_actors.engine.models.pictures.packing import Attention, attend_each

Size = tuple[int, int]
"""Height and width of a picture in tokens."""
Network = TypeVar("Network", bound="PackedNetwork")


class PackedNetwork(nn.Module, ABC):
    """Predicts velocities from noise towards pictures, for any mix of requests, sizes, moments and conditions at once.

    Args:
        channels: of the latents.
        patch: latent pixels along an edge of a token.
        attend: the attention to compute with; `attend_each` works everywhere.
    """

    def __init__(self, channels: int, patch: int, attend: Attention = attend_each) -> None:
        super().__init__()
        self.channels = channels
        self.patch = patch
        self.attend = attend

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and of what is computed with them."""
        return next(self.parameters()).dtype

    @abstractmethod
    def condition(self, given: Sequence[Any]) -> list[Any]:
        """What conditions, as the stage's requests have them, contribute to every step of theirs."""

    @abstractmethod
    def lay_out(self, pictures: Sequence[Size], conditions: Sequence[Any]) -> Any:
        """Where everything lies in the batch of sequences with these pictures and what `condition` gave for each."""

    @abstractmethod
    def forward(self, patches: torch.Tensor, moments: torch.Tensor, batch: Any) -> torch.Tensor:
        """The velocities [tokens, patch_width] of packed latents of this shape, at f32 [sequences] moments."""

    @abstractmethod
    def compile(self, **options: Any) -> None:
        """Compute what is between products and attention in fewer kernels. The options are those of `torch.compile`."""

    def draw(self) -> None:
        """Give the parameters random values that keep the size of what goes through the network."""
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)

    def patches_of(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [channels, height, width] as tokens [pixels / patch^2, patch^2 * channels]."""
        channels, height, width = latents.shape
        grid = latents.view(channels, height // self.patch, self.patch, width // self.patch, self.patch)
        return grid.permute(1, 3, 2, 4, 0).reshape(-1, self.patch**2 * channels)

    def latents_of(self, patches: torch.Tensor, size: Size) -> torch.Tensor:
        """The inverse of `patches_of`, for a picture of this size."""
        height, width = size
        grid = patches.view(height, width, self.patch, self.patch, -1)
        return grid.permute(4, 0, 2, 1, 3).reshape(-1, height * self.patch, width * self.patch)


def without_weights(make: Callable[[], Network], device: torch.device, dtype: torch.dtype) -> Network:
    """A network on a device whose parameters have any values; `draw` or a checkpoint gives them theirs."""
    with torch.device("meta"):
        network = make().to(dtype)
    return network.to_empty(device=device).requires_grad_(False).eval()
