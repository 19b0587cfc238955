"""How Qwen-Image's latents are scaled between its VAE and its diffusion transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from omni_actors.engine.models.qwen_image.pictures import LATENT_PIXELS
from omni_actors.errors import ConfigError

VAE_CLASS = "AutoencoderKLQwenImage21"


@dataclass(frozen=True)
class Scaling:
    """Mean and spread of each channel of the VAE's latents; the diffusion transformer's have 0 and 1."""

    mean: tuple[float, ...]
    spread: tuple[float, ...]

    @property
    def channels(self) -> int:
        """Of the latents."""
        return len(self.mean)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Scaling:
        """As the VAE's config.json says. Raises `ConfigError` if it does not, or is of another size of latents."""
        mean, spread = (tuple(config.get(name) or ()) for name in ("latents_mean", "latents_std"))
        if not mean or not len(mean) == len(spread) == config.get("z_dim"):
            raise ConfigError("The checkpoint's VAE needs z_dim values in latents_mean and in latents_std.")
        if config.get("scale_factor_spatial", LATENT_PIXELS) != LATENT_PIXELS or config.get("patch_size") is not None:
            raise ConfigError(f"The checkpoint's VAE must make a latent pixel of {LATENT_PIXELS} x {LATENT_PIXELS}.")
        return cls(mean, spread)

    def of_vae(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [channels, height, width] as the VAE has them."""
        mean, spread = self._like(latents)
        return latents * spread + mean

    def of_network(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [channels, height, width] as the diffusion transformer has them."""
        mean, spread = self._like(latents)
        return (latents - mean) / spread

    def _like(self, latents: torch.Tensor) -> list[torch.Tensor]:
        return [latents.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.spread)]
