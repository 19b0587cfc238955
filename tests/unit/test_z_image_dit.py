"""Tests of Z-Image's packed transformer against diffusers'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from omni_actors.engine.models.diffusers_layout import part_config
from omni_actors.engine.models.z_image.dit import ZImageConfig, ZImageNetwork
from omni_actors.errors import ConfigError
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
    dit.load(reference.state_dict().items())
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


# Pictures that fill a multiple of 32 tokens and others that do not, prompts of 1 to 64 tokens, five moments.
MIXED = [
    sequence(8, 8, 5, 0.1, 1),
    sequence(4, 6, 33, 0.9, 2),
    sequence(16, 12, 64, 0.0, 3),
    sequence(2, 2, 1, 0.55, 4),
    sequence(8, 8, 5, 0.3, 5),
]


@pytest.fixture(scope="module")
def reference():
    return Z_IMAGE.tiny_transformer()


@pytest.fixture(scope="module")
def dit(reference) -> ZImageNetwork:
    return same_dit(reference)


def test_five_sizes_moments_and_prompts_in_one_batch_equal_diffusers(dit, reference):
    for ours, one in zip(velocities(dit, MIXED), MIXED, strict=True):
        assert (ours - reference_velocity(reference, one)).abs().max() < 1e-5


def test_the_published_sizes_are_the_defaults(tmp_path):
    Z_IMAGE.write_full(tmp_path / "full")
    assert ZImageNetwork.read_config(part_config(tmp_path / "full", "transformer")) == ZImageConfig()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("layers.1.attention.to_k.weight"), "lacks 1 parameters.*layers.1.qkv.weight"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "'extra' that Z-Image has not"),
        (lambda weights: weights.update(x_pad_token=torch.zeros(1, 5)), "'x_pad_token' has the shape"),
    ],
)
def test_weights_that_do_not_fit_are_refused(reference, change, message):
    weights = dict(reference.state_dict())
    change(weights)
    with pytest.raises(ConfigError, match=message):
        ZImageNetwork(TINY_DIT).load(weights.items())
