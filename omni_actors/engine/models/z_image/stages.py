"""Z-Image's stages after the text encoder: hidden states of prompts to latents, and latents to pictures.

Latents are f32 [channels, height / 8, width / 8].
"""

from __future__ import annotations

import torch

from omni_actors.engine.models.diffusers_layout import PartConfig
from omni_actors.engine.models.pictures import NEGATIVE_STATES, STATES
from omni_actors.engine.models.pictures.denoising import PictureSpec
from omni_actors.engine.models.pictures.denoising_stage import DenoisingStage
from omni_actors.engine.models.pictures.vae_stage import PictureVae, VaeStage, picture_specs
from omni_actors.engine.models.z_image.dit import PATCH, ZImageNetwork, filled
from omni_actors.engine.workers.diffusion import SingleJob
from omni_actors.errors import ConfigError, PromptTooLong
from omni_actors.protocol.payloads import Parameter, StageParams
from omni_actors.stage.engine_interface import StageInputs

LATENT_PIXELS = 8  # along an edge of a latent pixel


class ZImageDit(DenoisingStage):
    """One job for each picture."""

    network_class = ZImageNetwork
    activations = 16  # queries, keys and values, the two halves of the wider layer and what they are made from
    defaults = StageParams(width=1024, height=1024, num_steps=50, guidance_scale=5.0, previews=0)
    latent_pixels = LATENT_PIXELS
    multiple = LATENT_PIXELS * PATCH
    guidance = Parameter(
        "guidance_scale", "float", 0.0, 100.0, default=defaults.guidance_scale,
        about="how strongly the picture follows its prompt; 0 for none, twice as fast",
    )  # fmt: skip

    @property
    def longest_edge(self) -> int:
        """As many tokens as there are positions."""
        rows, columns = self.network.lengths[1:]
        return int(min(rows, columns)) * self.multiple

    def warm_up_condition(self) -> torch.Tensor:
        """States of a prompt of two tokens."""
        return torch.zeros(2, self.network.text_width)

    def conditions(self, inputs: StageInputs, guidance: float) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        """The states of the prompt, and with guidance those of the negative prompt."""
        states = self._states(inputs, STATES)
        return states, self._states(inputs, NEGATIVE_STATES) if guidance > 0 else None, guidance

    def _states(self, inputs: StageInputs, name: str) -> torch.Tensor:
        states, positions = self.read_states(inputs.tensors, name), self.network.lengths[0]
        if filled(len(states)) + 2 > positions:
            raise PromptTooLong(f"The prompt has {len(states)} tokens; this model takes {positions - 2}.")
        return states

    def stream(self, spec: PictureSpec, input_tokens: int) -> SingleJob:
        """The job of a picture: latents, refined prompts and rotations are held."""
        texts = [filled(len(each)) for each in spec.conditions]
        tokens = sum(filled(spec.tokens) + text for text in texts)
        return SingleJob(self.picture_job(spec, tokens, self.needed(tokens), self.bytes_of(sum(texts))), input_tokens)


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


# Tokens in a step: with those of one picture of 512 x 512 an H200 is full, so more would only let pictures wait.
SPEC = picture_specs("num_key_value_heads", ZImageDit, 2560, ZImageVaeDecoder)
