"""Tests of FLUX.2's packed transformer, its schedule and what it makes of references, against diffusers'."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image

from omni_actors.engine.models.diffusers_layout import part_config
from omni_actors.engine.models.flux2.dit import Flux2Condition, Flux2Config, Flux2Network
from omni_actors.engine.models.flux2.dit_stage import log_shift
from omni_actors.engine.models.flux2.layout import reference_picture
from omni_actors.engine.models.pictures.denoising import FlowSchedule
from omni_actors.errors import ConfigError, InvalidRequest
from tools.checkpoints.pictures import FLUX2_KLEIN

SIZES = FLUX2_KLEIN.family.tiny_sizes()


@dataclass
class Sequence:
    """A picture at a moment, with what it is made of."""

    latents: torch.Tensor
    moment: float
    condition: Flux2Condition


def sequence(size: tuple[int, int], text: int, others: list[tuple[int, int]], moment: float) -> Sequence:
    generator = torch.Generator().manual_seed(int(1000 * moment))
    references = tuple(torch.randn(SIZES["channels"], *other, generator=generator) for other in others)
    states = torch.randn(text, SIZES["states_width"], generator=generator)
    latents = torch.randn(SIZES["channels"], *size, generator=generator)
    return Sequence(latents, moment, Flux2Condition(states, references))


# Pictures of no, one and two others.
MIXED = [
    sequence((6, 8), 5, [], 0.1),
    sequence((4, 4), 1, [], 1.0),
    sequence((2, 6), 512, [(4, 6)], 0.55),
    sequence((6, 8), 30, [(4, 4), (6, 2)], 0.3),
    sequence((6, 8), 9, [], 0.02),
]


@pytest.fixture(scope="module")
def reference():
    return FLUX2_KLEIN.tiny_transformer()


@pytest.fixture(scope="module")
def dit(reference) -> Flux2Network:
    made = Flux2Network(Flux2Network.read_config(written(reference))).eval()
    made.load(reference.state_dict().items())
    return made


def written(reference) -> dict:
    return {
        **reference.config,
        "axes_dims_rope": list(reference.config.axes_dims_rope),
        "_class_name": "Flux2Transformer2DModel",
    }


@torch.inference_mode()
def velocities(dit: Flux2Network, sequences: list[Sequence]) -> list[torch.Tensor]:
    """Of each sequence's latents, all computed in one batch."""
    sizes = [tuple(one.latents.shape[1:]) for one in sequences]
    batch = dit.lay_out(sizes, dit.condition([one.condition for one in sequences]))
    patches = torch.cat([dit.patches_of(one.latents) for one in sequences])
    parts = dit(patches, torch.tensor([one.moment for one in sequences]), batch).split([h * w for h, w in sizes])
    return [dit.latents_of(part, size) for part, size in zip(parts, sizes, strict=True)]


@torch.inference_mode()
def reference_velocity(reference, one: Sequence) -> torch.Tensor:
    """What diffusers computes for one sequence alone."""
    shown = [one.latents, *one.condition.references]
    places = [
        torch.cartesian_prod(torch.tensor([10 * number]), *map(torch.arange, latents.shape[1:]), torch.tensor([0]))
        for number, latents in enumerate(shown)
    ]
    text = torch.arange(len(one.condition.states))
    output = reference(
        hidden_states=torch.cat([latents.flatten(1).T for latents in shown])[None],
        timestep=torch.tensor([one.moment]),
        encoder_hidden_states=one.condition.states[None],
        txt_ids=torch.cartesian_prod(*[torch.tensor([0])] * 3, text),
        img_ids=torch.cat(places),
        return_dict=False,
    )
    return -output[0][0, : one.latents[0].numel()].T.reshape(one.latents.shape)


def test_pictures_of_no_one_and_two_others_in_one_batch_equal_diffusers(dit, reference):
    for ours, one in zip(velocities(dit, MIXED), MIXED, strict=True):
        assert (ours - reference_velocity(reference, one)).abs().max() < 1e-5


def test_the_published_sizes_are_the_defaults(tmp_path):
    FLUX2_KLEIN.write_full(tmp_path / "full")
    assert Flux2Network.read_config(part_config(tmp_path / "full", "transformer")) == Flux2Config()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "Other"}, "is 'Other', not Flux2Transformer2DModel"),
        ({"guidance_embeds": True}, "guidance_embeds True; only False"),
        ({"attention_head_dim": 64}, "attention_head_dim 64; only 32"),
    ],
)
def test_a_transformer_of_another_kind_is_refused(reference, change, message):
    with pytest.raises(ConfigError, match=message):
        Flux2Network.read_config(written(reference) | change)


@pytest.mark.parametrize("tokens", [1, 1024, 4096, 16_384])
def test_the_shares_of_noise_are_those_of_diffusers(tokens):
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    scheduler = FLUX2_KLEIN.make_scheduler()
    schedule = FlowSchedule.from_config(scheduler.config, rising=False, log_shift=log_shift)
    for steps in (1, 4, 50):
        line = np.linspace(1.0, 1 / steps, steps)
        scheduler.set_timesteps(sigmas=line, mu=compute_empirical_mu(tokens, steps))
        assert (schedule.sigmas(steps, tokens) - scheduler.sigmas).abs().max() < 1e-6


@pytest.mark.parametrize("size", [(160, 128), (1500, 1100), (77, 500)])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_references_are_scaled_and_cut_as_diffusers_does_it(size, mode):
    from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor as Processor

    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], len(mode)), dtype=np.uint8)
    noise[..., 3:] = 255
    image = Image.fromarray(noise)
    theirs = image
    if size[0] * size[1] > 1024 * 1024:  # as the pipeline does it
        scale = (1024 * 1024 / (size[0] * size[1])) ** 0.5
        theirs = image.resize((int(size[0] * scale), int(size[1] * scale)), Image.Resampling.LANCZOS)
    width, height = (edge // 16 * 16 for edge in theirs.size)
    levels = Processor(vae_scale_factor=16).preprocess(theirs, height=height, width=width, resize_mode="crop")[0]
    ours = torch.from_numpy(np.array(reference_picture(image.convert("RGBA")))).permute(2, 0, 1) / 255 * 2 - 1
    assert ours.shape == levels.shape
    assert (ours - levels).abs().max() < 1e-6


@pytest.mark.parametrize("size", [(63, 100), (900, 100)])
def test_pictures_that_diffusers_refuses_are_refused(size):
    with pytest.raises(InvalidRequest, match=f"{size[0]} x {size[1]}"):
        reference_picture(Image.new("RGBA", size))
