"""FLUX.2's VAE encoder: the pictures that a prompt refers to become latents."""

from __future__ import annotations

from omni_actors.engine.models.flux2.layout import LATENT_PIXELS
from omni_actors.engine.models.flux2.vae_stage import Flux2Vae
from omni_actors.engine.models.pictures.vae_stage import VaeEncoderStage, vae_spec


class Flux2VaeEncoder(VaeEncoderStage):
    """Pictures u8 [height, width, 3] to latents f32 [channels, height / 16, width / 16]."""

    vae_class = Flux2Vae


SPEC = vae_spec("flux2.vae_encoder_stage.Flux2VaeEncoder", "num_key_value_heads", LATENT_PIXELS)
