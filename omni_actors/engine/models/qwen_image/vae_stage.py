"""Qwen-Image's last stage: latents f32 [channels, height, width] to pictures u8 [16 * height, 16 * width, 3 or 4]."""

from __future__ import annotations

from omni_actors.engine.models.pictures.vae_stage import BACKGROUND, VaeStage, vae_spec
from omni_actors.engine.models.qwen_image.vae import QwenImageVae


class QwenImageVaeStage(VaeStage):
    """Decodes to pictures with an alpha channel, or without if they are to be opaque."""

    vae_class = QwenImageVae
    parameters = (BACKGROUND,)


SPEC = vae_spec("qwen_image.vae_stage.QwenImageVaeStage", "vision_config", QwenImageVae.latent_pixels)
