"""Z-Image's denoising stage: hidden states of prompts to latents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from omni_actors.engine.models import ModelSpec
from omni_actors.engine.models.pictures.denoising import FlowSchedule, PictureSpec
from omni_actors.engine.models.pictures.denoising_stage import MAX_STEPS, DenoisingStage
from omni_actors.engine.models.pictures.weights import PartConfig
from omni_actors.engine.models.placeholder import ARCHITECTURE, PlaceholderModel, placeholder_overrides
from omni_actors.engine.models.z_image.dit import PATCH, ZImageConfig, ZImageNetwork, filled, load
from omni_actors.engine.workers.diffusion import DiffusionJob, SingleJob
from omni_actors.errors import ConfigError, PromptTooLong
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import Parameter, StageParams
from omni_actors.stage.engine_interface import StageInputs

STATES, NEGATIVE_STATES = "states", "negative_states"  # names of the prompts' hidden states [tokens, text_width]
LATENT_PIXELS = 8  # along an edge of a latent pixel
DEFAULTS = StageParams(width=1024, height=1024, num_steps=50, guidance_scale=5.0, previews=0)
# Activations of a step in values of `width` per token: queries, keys and values, the two halves of the wider layer and
# what they are made from.
ACTIVATIONS = 16


class ZImageDit(DenoisingStage):
    """Hidden states to latents, f32 [channels, height / 8, width / 8]."""

    defaults = DEFAULTS
    latent_pixels = LATENT_PIXELS
    multiple = LATENT_PIXELS * PATCH
    guidance = Parameter(
        "guidance_scale", "float", 0.0, 100.0, default=DEFAULTS.guidance_scale,
        about="how strongly the picture follows its prompt; 0 for none, twice as fast",
    )  # fmt: skip

    def configure(self, config: Mapping[str, Any]) -> None:
        """Take the sizes that the transformer's config.json describes."""
        self.config = dit_config(config)
        self.longest_edge = min(self.config.lengths[1:]) * self.multiple

    def read_schedule(self, config: Mapping[str, Any]) -> FlowSchedule:
        """The schedule that scheduler_config.json describes."""
        return FlowSchedule.from_config(config)

    def network(self) -> ZImageNetwork:
        """The network, with any weights."""
        return ZImageNetwork(self.config)

    def load_weights(self, network: ZImageNetwork, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give the network its weights."""
        load(network, weights)

    def warm_up_condition(self) -> torch.Tensor:
        """States of a prompt of two tokens."""
        return torch.zeros(2, self.config.text_width)

    def conditions(self, inputs: StageInputs, guidance: float) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        """The states of the prompt, and with guidance those of the negative prompt."""
        states = self._states(inputs.tensors.get(STATES), STATES)
        negative = self._states(inputs.tensors.get(NEGATIVE_STATES), NEGATIVE_STATES) if guidance > 0 else None
        return states, negative, guidance

    def _states(self, given: HostTensor | None, name: str) -> torch.Tensor:
        states = self.read_states(given, name, self.config.text_width)
        if filled(len(states)) + 2 > self.config.lengths[0]:
            raise PromptTooLong(f"The prompt has {len(states)} tokens; this model takes {self.config.lengths[0] - 2}.")
        return states

    def tokens_of(self, condition: torch.Tensor) -> int:
        """Tokens of a prompt."""
        return len(condition)

    def stream(self, spec: PictureSpec, input_tokens: int) -> SingleJob:
        """The job of a picture: latents, refined prompts and rotations are held."""
        texts = [filled(len(each)) for each in spec.conditions]
        tokens = sum(filled(spec.tokens) + text for text in texts)
        width, itemsize = self.config.width, self.dtype.itemsize
        rotation = 8 * sum(self.config.axes)
        step = tokens * (ACTIVATIONS * width * itemsize + rotation)
        job = DiffusionJob(
            spec,
            spec.num_steps,
            step_bytes=step,
            final_bytes=step,
            held_bytes=4 * self.config.patch_width * spec.tokens + sum(texts) * (width * itemsize + rotation),
            tokens=tokens,
            reports_progress=spec.num_steps > 1,
        )
        return SingleJob(job, input_tokens)


def dit_config(config: Mapping[str, Any]) -> ZImageConfig:
    """The sizes that a transformer's config.json describes.

    Raises:
        ConfigError: it describes another network, or lacks a size.
    """
    part = PartConfig("transformer", config, "ZImageTransformer2DModel")
    part.expect(all_patch_size=[PATCH], all_f_patch_size=[1], qk_norm=True, siglip_feat_dim=None)
    if part["n_kv_heads"] != part["n_heads"]:
        raise ConfigError("The checkpoint's transformer shares keys between heads, which is not supported.")
    return ZImageConfig(
        channels=part["in_channels"],
        width=part["dim"],
        layers=part["n_layers"],
        refiners=part["n_refiner_layers"],
        heads=part["n_heads"],
        text_width=part["cap_feat_dim"],
        theta=part["rope_theta"],
        axes=tuple(part["axes_dims"]),
        lengths=tuple(part["axes_lens"]),
        time_scale=part["t_scale"],
        eps=part["norm_eps"],
    )


SPEC = ModelSpec(
    kind="diffusion",
    folder="text_encoder",
    hf_overrides=placeholder_overrides("num_key_value_heads", MAX_STEPS),
    vllm_models={ARCHITECTURE: PlaceholderModel},
    # Tokens in a step: with those of one picture of 512 x 512 an H200 is full, so more would only let pictures wait.
    engine={"max_num_seqs": 32, "max_num_batched_tokens": 2560, "dtype": "bfloat16"},
    required={"max_model_len": MAX_STEPS + 1, "skip_tokenizer_init": True},
    params=DEFAULTS,
    runner="omni_actors.engine.models.z_image.dit_stage.ZImageDit",
)
