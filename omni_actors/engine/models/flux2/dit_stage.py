"""FLUX.2's denoising stage: states of prompts, and latents of pictures that they refer to, to latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from omni_actors.engine.models.diffusers_layout import diffusers_class
from omni_actors.engine.models.flux2 import LATENT_PIXELS, MAX_TOKENS, is_distilled
from omni_actors.engine.models.flux2.dit import Flux2Condition, Flux2Network
from omni_actors.engine.models.pictures import NEGATIVE_STATES, STATES
from omni_actors.engine.models.pictures.denoising import FlowSchedule, PictureSpec
from omni_actors.engine.models.pictures.denoising_stage import MAX_STEPS, DenoisingStage
from omni_actors.engine.models.placeholder import picture_spec
from omni_actors.engine.workers.diffusion import SingleJob
from omni_actors.protocol.payloads import Parameter, StageParams
from omni_actors.stage.engine_interface import StageInputs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEFAULTS = StageParams(width=1024, height=1024, num_steps=4, guidance_scale=1.0, previews=0)


class Flux2Dit(DenoisingStage):
    """Latents f32 [channels, height / 16, width / 16], in one job for each picture."""

    network_class = Flux2Network
    adaptable = True
    activations = 24  # what a single layer makes, the wider layer's two halves and what they are made from
    defaults = DEFAULTS
    latent_pixels = multiple = LATENT_PIXELS

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._distilled = is_distilled(self.folder)
        about = "how far the picture keeps from its negative prompt; above 1, half as fast"
        if self._distilled:
            about = "accepted and ignored: this checkpoint is distilled, and makes pictures without guidance"
        self.guidance = Parameter("guidance_scale", "float", 0.0, 100.0, default=DEFAULTS.guidance_scale, about=about)

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


# Tokens in a step: those of two pictures of 512 x 512 with their prompts.
SPEC = picture_spec(
    "omni_actors.engine.models.flux2.dit_stage.Flux2Dit",
    "num_key_value_heads",
    MAX_STEPS,
    {"max_num_seqs": 32, "max_num_batched_tokens": 3072},
    compiled=True,
    params=DEFAULTS,
)
