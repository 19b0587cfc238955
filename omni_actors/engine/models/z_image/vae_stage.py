"""Z-Image's last stage: latents to pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from omni_actors.engine.models import ModelSpec
from omni_actors.engine.models.pictures.denoising_stage import MAX_PIXELS
from omni_actors.engine.models.pictures.vae_stage import MAX_STEPS, VaeStage
from omni_actors.engine.models.placeholder import ARCHITECTURE, PlaceholderModel, placeholder_overrides
from omni_actors.engine.models.z_image.dit_stage import LATENT_PIXELS
from omni_actors.errors import ConfigError


class ZImageVae(VaeStage):
    """Latents f32 [channels, height, width] to pictures u8 [8 * height, 8 * width, 3]."""

    class_name = "AutoencoderKL"
    latent_pixels = LATENT_PIXELS

    def configure(self, config: Mapping[str, Any]) -> None:
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
        picture: torch.Tensor = self.vae.decode((latents / self._scale + self._shift)[None], return_dict=False)[0][0]
        return picture


SPEC = ModelSpec(
    kind="diffusion",
    folder="text_encoder",
    hf_overrides=placeholder_overrides("num_key_value_heads", MAX_STEPS),
    vllm_models={ARCHITECTURE: PlaceholderModel},
    # Tokens are latent pixels: one picture of 2048 x 2048, or four of 1024 x 1024 at a time.
    engine={"max_num_seqs": 8, "max_num_batched_tokens": MAX_PIXELS // LATENT_PIXELS**2, "dtype": "bfloat16"},
    required={"max_model_len": MAX_STEPS + 1, "skip_tokenizer_init": True, "enforce_eager": True},
    runner="omni_actors.engine.models.z_image.vae_stage.ZImageVae",
)
