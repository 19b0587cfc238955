"""FLUX.2's VAE, and its stages: the encoder of pictures that a prompt refers to, and the last stage."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from omni_actors.engine.models.diffusers_layout import PartConfig
from omni_actors.engine.models.flux2 import LATENT_PIXELS
from omni_actors.engine.models.pictures.vae_stage import PictureVae, VaeEncoderStage, VaeStage, vae_specs
from omni_actors.errors import ConfigError

EDGE = 2  # the VAE's own latent pixels along an edge of one of the denoising stage's


class Flux2Vae(PictureVae):
    """The VAE, whose latents are normed by statistics among its weights."""

    class_name = "AutoencoderKLFlux2"
    latent_pixels = multiple = LATENT_PIXELS

    def configure(self, config: PartConfig) -> None:
        """Take the sizes."""
        config.expect(patch_size=[EDGE, EDGE])
        blocks: list[int] = config.get("block_out_channels", [64])
        if EDGE * 2 ** (len(blocks) - 1) != LATENT_PIXELS:
            raise ConfigError(f"The checkpoint's VAE has {len(blocks)} blocks; FLUX.2's has 4.")
        self.channels = EDGE**2 * config["latent_channels"]
        self.width = max(blocks[0], (config.get("decoder_block_out_channels") or blocks)[0])
        self._eps: float = config.get("batch_norm_eps", 1e-4)

    def encode(self, levels: torch.Tensor) -> torch.Tensor:
        """The mean of a picture's latents."""
        mean, spread = self._scaling(levels)
        latents: torch.Tensor = self.model.encode(levels[None]).latent_dist.mode()[0]
        return (F.pixel_unshuffle(latents, EDGE) - mean) / spread

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The picture [3, height, width] from -1 to 1."""
        mean, spread = self._scaling(latents)
        given = F.pixel_shuffle(latents * spread + mean, EDGE)
        picture: torch.Tensor = self.model.decode(given[None], return_dict=False)[0][0]
        return picture

    def _scaling(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and spread of each channel."""
        norm = self.model.bn
        mean, spread = norm.running_mean, torch.sqrt(norm.running_var + self._eps)
        return mean.view(-1, 1, 1).to(like.dtype), spread.view(-1, 1, 1).to(like.dtype)


class Flux2VaeEncoder(VaeEncoderStage):
    """Pictures u8 [height, width, 3] to latents f32 [channels, height / 16, width / 16]."""

    vae_class = Flux2Vae


class Flux2VaeDecoder(VaeStage):
    """Latents to pictures u8 [16 * height, 16 * width, 3]."""

    vae_class = Flux2Vae


SPEC = vae_specs("num_key_value_heads", Flux2VaeDecoder, Flux2VaeEncoder)
