"""Z-Image's denoising stage: hidden states of prompts to latents, f32 [channels, height / 8, width / 8]."""

from __future__ import annotations

import torch

from omni_actors.engine.models.pictures import NEGATIVE_STATES, STATES
from omni_actors.engine.models.pictures.denoising import PictureSpec
from omni_actors.engine.models.pictures.denoising_stage import MAX_STEPS, DenoisingStage
from omni_actors.engine.models.placeholder import picture_spec
from omni_actors.engine.models.z_image.dit import PATCH, ZImageNetwork, filled
from omni_actors.engine.workers.diffusion import SingleJob
from omni_actors.errors import PromptTooLong
from omni_actors.protocol.payloads import Parameter, StageParams
from omni_actors.stage.engine_interface import StageInputs

LATENT_PIXELS = 8  # along an edge of a latent pixel
DEFAULTS = StageParams(width=1024, height=1024, num_steps=50, guidance_scale=5.0, previews=0)


class ZImageDit(DenoisingStage):
    """One job for each picture."""

    network_class = ZImageNetwork
    activations = 16  # queries, keys and values, the two halves of the wider layer and what they are made from
    defaults = DEFAULTS
    latent_pixels = LATENT_PIXELS
    multiple = LATENT_PIXELS * PATCH
    guidance = Parameter(
        "guidance_scale", "float", 0.0, 100.0, default=DEFAULTS.guidance_scale,
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


# Tokens in a step: with those of one picture of 512 x 512 an H200 is full, so more would only let pictures wait.
SPEC = picture_spec(
    "omni_actors.engine.models.z_image.dit_stage.ZImageDit",
    "num_key_value_heads",
    MAX_STEPS,
    {"max_num_seqs": 32, "max_num_batched_tokens": 2560},
    compiled=True,
    params=DEFAULTS,
)
