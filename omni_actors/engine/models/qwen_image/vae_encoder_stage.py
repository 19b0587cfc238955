"""Qwen-Image's VAE encoder: the pictures that a prompt refers to become latents."""

from __future__ import annotations

from omni_actors.engine.models.pictures.vae_stage import VaeEncoderStage, vae_spec
from omni_actors.engine.models.qwen_image.vae import QwenImageVae


class QwenImageVaeEncoder(VaeEncoderStage):
    """Pictures u8 [height, width, 4] to latents f32 [channels, height / 16, width / 16]."""

    vae_class = QwenImageVae


SPEC = vae_spec("qwen_image.vae_encoder_stage.QwenImageVaeEncoder", "vision_config", QwenImageVae.latent_pixels)
