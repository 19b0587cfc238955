"""Qwen-Image's last stage: latents to pictures with an alpha channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from omni_actors.engine.models import ModelSpec
from omni_actors.engine.models.pictures.denoising_stage import MAX_PIXELS
from omni_actors.engine.models.pictures.vae_stage import BACKGROUND, MAX_STEPS, VaeStage
from omni_actors.engine.models.placeholder import ARCHITECTURE, PlaceholderModel, placeholder_overrides
from omni_actors.engine.models.qwen_image.layout import LATENT_PIXELS, VAE_CLASS, Scaling
from omni_actors.engine.models.qwen_image.vae_decoder import PictureDecoder
from omni_actors.errors import ConfigError


class QwenImageVae(VaeStage):
    """Latents f32 [channels, height, width] to pictures u8 [16 * height, 16 * width, 4], or 3 if opaque."""

    class_name = VAE_CLASS
    latent_pixels = LATENT_PIXELS
    parameters = (BACKGROUND,)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Take the sizes, and how latents are scaled."""
        self._scaling = Scaling.of(config)
        if not config.get("is_residual", True):
            raise ConfigError("The checkpoint's VAE lacks the shortcuts (is_residual) that this model's has.")
        self.channels = self._scaling.channels
        self.width = config.get("decoder_base_dim") or config.get("base_dim") or 1

    def load(self, *, dummy: bool) -> None:
        """Load the VAE."""
        super().load(dummy=dummy)
        self._decoder = PictureDecoder(self.vae, fused=self.device.type == "cuda")

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The picture [4, height, width] from -1 to 1."""
        return self._decoder(self._scaling.of_vae(latents))


SPEC = ModelSpec(
    kind="diffusion",
    folder="text_encoder",
    hf_overrides=placeholder_overrides("vision_config", MAX_STEPS),
    vllm_models={ARCHITECTURE: PlaceholderModel},
    # Tokens are latent pixels: one picture of 2048 x 2048, or four of 1024 x 1024 at a time.
    engine={"max_num_seqs": 8, "max_num_batched_tokens": MAX_PIXELS // LATENT_PIXELS**2, "dtype": "bfloat16"},
    required={"max_model_len": MAX_STEPS + 1, "skip_tokenizer_init": True, "enforce_eager": True},
    runner="omni_actors.engine.models.qwen_image.vae_stage.QwenImageVae",
)
