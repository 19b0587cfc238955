"""A tiny Z-Image transformer, ours and diffusers', with the same weights, and sequences to compare them with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from omni_actors.engine.models.z_image.dit import ZImageConfig, ZImageNetwork, load
from tools.checkpoints.pictures import Z_IMAGE

if TYPE_CHECKING:
    from diffusers import ZImageTransformer2DModel

TINY = Z_IMAGE.tiny
TINY_DIT = ZImageConfig(
    channels=TINY["channels"],
    width=TINY["heads"] * sum(TINY["axes"]),
    layers=TINY["layers"],
    refiners=TINY["refiners"],
    heads=TINY["heads"],
    text_width=TINY["text_width"],
    axes=tuple(TINY["axes"]),
    lengths=tuple(TINY["lengths"]),
)


@dataclass
class Sequence:
    """A picture of `height` x `width` tokens at a moment, with the hidden states of its prompt."""

    height: int
    width: int
    moment: float
    latents: torch.Tensor
    states: torch.Tensor


def sequence(height: int, width: int, prompt: int, moment: float, seed: int = 0) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(TINY_DIT.channels, 2 * height, 2 * width, generator=generator)
    return Sequence(height, width, moment, latents, torch.randn(prompt, TINY_DIT.text_width, generator=generator))


def same_dit(reference: ZImageTransformer2DModel) -> ZImageNetwork:
    """Our network with the weights of diffusers'."""
    dit = ZImageNetwork(TINY_DIT).eval()
    load(dit, reference.state_dict().items())
    return dit


@torch.inference_mode()
def velocities(dit: ZImageNetwork, sequences: list[Sequence]) -> list[torch.Tensor]:
    """Of each sequence's latents, all computed in one batch."""
    batch = dit.lay_out(
        [(each.height, each.width) for each in sequences], dit.condition([each.states for each in sequences])
    )
    patches = torch.cat([dit.patches_of(each.latents) for each in sequences])
    parts = dit(patches, torch.tensor([each.moment for each in sequences]), batch).split(
        [each.height * each.width for each in sequences]
    )
    return [dit.latents_of(part, (each.height, each.width)) for part, each in zip(parts, sequences, strict=True)]


@torch.inference_mode()
def reference_velocity(reference: ZImageTransformer2DModel, one: Sequence) -> torch.Tensor:
    """What diffusers computes for one sequence alone."""
    output = reference([one.latents[:, None]], torch.tensor([one.moment]), [one.states])
    return output.sample[0][:, 0]
