"""FLUX.2's stages after the text encoder: states and latents of references to latents, and the VAE's two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from omni_actors.engine.models.diffusers_layout import PartConfig, diffusers_class
from omni_actors.engine.models.flux2 import LATENT_PIXELS, MAX_TOKENS, is_distilled
from omni_actors.engine.models.flux2.dit import Flux2Condition, Flux2Network
from omni_actors.engine.models.pictures import NEGATIVE_STATES, STATES
from omni_actors.engine.models.pictures.denoising import FlowSchedule, PictureSpec
from omni_actors.engine.models.pictures.denoising_stage import DenoisingStage
from omni_actors.engine.models.pictures.vae_stage import PictureVae, VaeEncoderStage, VaeStage, picture_specs
from omni_actors.engine.workers.diffusion import SingleJob
from omni_actors.errors import ConfigError
from omni_actors.protocol.payloads import Parameter, StageParams
from omni_actors.stage.engine_interface import StageInputs

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Flux2Dit(DenoisingStage):
    """Latents f32 [channels, height / 16, width / 16], in one job for each picture."""

    network_class = Flux2Network
    adaptable = True
    activations = 24  # what a single layer makes, the wider layer's two halves and what they are made from
    defaults = StageParams(width=1024, height=1024, num_steps=4, guidance_scale=1.0, previews=0)
    latent_pixels = multiple = LATENT_PIXELS

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._distilled = is_distilled(self.folder)
        about = "how far the picture keeps from its negative prompt; above 1, half as fast"
        if self._distilled:
            about = "accepted and ignored: this checkpoint is distilled, and makes pictures without guidance"
        self.guidance = Parameter(
            "guidance_scale", "float", 0.0, 100.0, default=self.defaults.guidance_scale, about=about
        )

    def read_schedule(self, config: Mapping[str, Any]) -> FlowSchedule:
        """The schedule that scheduler_config.json describes."""
        diffusers_class("Flux2KleinPipeline")  # else an error says what to install
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        return FlowSchedule.from_config(config, rising=False, log_shift=compute_empirical_mu)

    def warm_up_condition(self) -> Flux2Condition:
        """A prompt, which has as many tokens as any."""
        return Flux2Condition(torch.zeros(MAX_TOKENS, self.network.text_width))

    def conditions(self, inputs: StageInputs, guidance: float) -> tuple[Flux2Condition, Flux2Condition | None, float]:
        """The prompt, and with guidance the negative prompt, which refers to the same pictures."""
        references = self.read_references(inputs.tensors)
        names = [STATES] if self._distilled or guidance <= 1.0 else [STATES, NEGATIVE_STATES]
        condition, *negative = (Flux2Condition(self.read_states(inputs.tensors, name), references) for name in names)
        return (condition, negative[0], guidance - 1.0) if negative else (condition, None, 0.0)

    def stream(self, spec: PictureSpec, input_tokens: int) -> SingleJob:
        """The job of a picture: latents, and what its conditions contribute, are held."""
        tokens = spec.tokens * len(spec.conditions) + input_tokens
        return SingleJob(self.picture_job(spec, tokens, self.needed(tokens), self.bytes_of(input_tokens)), input_tokens)


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


# Tokens in a step: those of four pictures of 512 x 512 with their prompts.
SPEC = picture_specs("num_key_value_heads", Flux2Dit, 6144, Flux2VaeDecoder, Flux2VaeEncoder)
