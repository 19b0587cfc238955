"""Z-Image's last stage: latents f32 [channels, height, width] to pictures u8 [8 * height, 8 * width, 3]."""

from __future__ import annotations

import torch

from omni_actors.engine.models.diffusers_layout import PartConfig
from omni_actors.engine.models.pictures.vae_stage import PictureVae, VaeStage, vae_specs
from omni_actors.engine.models.z_image.dit_stage import LATENT_PIXELS
from omni_actors.errors import ConfigError


class ZImageVae(PictureVae):
    """The VAE, whose latents are scaled and shifted."""

    class_name = "AutoencoderKL"
    latent_pixels = LATENT_PIXELS

    def configure(self, config: PartConfig) -> None:
        """Take the sizes, and how latents are scaled."""
        self.channels = config.get("latent_channels", 16)
        self._scale: float = config.get("scaling_factor", 1.0)
        self._shift: float = config.get("shift_factor") or 0.0
        blocks: list[int] = config.get("block_out_channels", [1])
        if 2 ** (len(blocks) - 1) != LATENT_PIXELS:
            raise ConfigError(f"The checkpoint's VAE has {len(blocks)} blocks; Z-Image's has 4.")
        self.width = max(blocks[0], 1)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The picture [3, height, width] from -1 to 1."""
        picture: torch.Tensor = self.model.decode((latents / self._scale + self._shift)[None], return_dict=False)[0][0]
        return picture


class ZImageVaeDecoder(VaeStage):
    """Decodes."""

    vae_class = ZImageVae


SPEC = vae_specs("num_key_value_heads", ZImageVaeDecoder)
