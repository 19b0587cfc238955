"""Tests of Qwen-Image's packed transformer against diffusers'."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import yaml

from omni_actors.engine.models.diffusers_layout import part_config
from omni_actors.engine.models.pictures.denoising import PictureSpec
from omni_actors.engine.models.qwen_image.dit import Condition, Prefix, QwenImageConfig, QwenImageNetwork, parts
from omni_actors.engine.models.qwen_image.dit_stage import SPEC
from omni_actors.errors import ConfigError
from tests.support.paths import REPOSITORY
from tools.checkpoints.pictures import QWEN_IMAGE

YAML = REPOSITORY / "stage_configs" / "qwen_image.yaml"
SIZES = QWEN_IMAGE.tiny
TINY = QwenImageConfig(
    channels=SIZES["channels"],
    layers=SIZES["layers"],
    heads=SIZES["heads"],
    head_width=sum(SIZES["axes"]),
    text_width=SIZES["text_width"],
    axes=tuple(SIZES["axes"]),
)


@dataclass
class Sequence:
    """A picture of a size in tokens at a moment, with what it is made of."""

    latents: torch.Tensor
    moment: float
    condition: Condition


def sequence(size: tuple[int, int], runs: tuple[int, ...], others: list[tuple[int, int]], moment: float) -> Sequence:
    generator = torch.Generator().manual_seed(int(1000 * moment))
    references = tuple(torch.randn(TINY.channels, *other, generator=generator) for other in others)
    states = torch.randn(sum(runs), TINY.text_width, generator=generator)
    latents = torch.randn(TINY.channels, *size, generator=generator)
    return Sequence(latents, moment, Condition(states, runs, references))


# Pictures of no, one and three others; two of these are without text between them.
MIXED = [
    sequence((6, 8), (5,), [], 0.1),
    sequence((4, 4), (1,), [], 1.0),
    sequence((2, 6), (3, 7), [(4, 6)], 0.55),
    sequence((6, 8), (2, 0, 4, 5), [(4, 4), (6, 2), (2, 8)], 0.3),
    sequence((6, 8), (9,), [], 0.02),
]


@pytest.fixture(scope="module")
def reference():
    return QWEN_IMAGE.tiny_transformer()


@pytest.fixture(scope="module")
def dit(reference) -> QwenImageNetwork:
    made = QwenImageNetwork(TINY).eval()
    made.load(reference.state_dict().items())
    return made


@torch.inference_mode()
def velocities(dit: QwenImageNetwork, sequences: list[Sequence]) -> list[torch.Tensor]:
    """Of each sequence's latents, all computed in one batch."""
    sizes = [tuple(one.latents.shape[1:]) for one in sequences]
    batch = dit.lay_out(sizes, dit.condition([Prefix(one.condition) for one in sequences]))
    patches = torch.cat([dit.patches_of(one.latents) for one in sequences])
    parts = dit(patches, torch.tensor([one.moment for one in sequences]), batch).split(batch.pictures.lengths)
    return [dit.latents_of(part, size) for part, size in zip(parts, sizes, strict=True)]


@torch.inference_mode()
def reference_velocity(reference, one: Sequence) -> torch.Tensor:
    """What diffusers computes for one sequence alone; it lays a picture over a quarter as many places in the text."""
    given, shapes, states, shown = one.condition, [], [], []
    texts = given.states.split(given.lengths)
    for index, text in enumerate(texts):
        states.append(text)
        shown += [False] * len(text)
        if index < len(given.references):
            height, width = given.references[index].shape[1:]
            shapes.append((1, height, width))
            states.append(torch.zeros(height * width // 4, TINY.text_width))
            shown += [True] * (height * width // 4)
    _, height, width = one.latents.shape
    tokens = [each.flatten(1).T for each in (*given.references, one.latents)]
    mask = torch.tensor(shown + [True] * (height * width // 4))
    output = reference(
        hidden_states=torch.cat(tokens)[None],
        timestep=torch.tensor([one.moment]),
        encoder_hidden_states=torch.cat(states)[None],
        img_shapes=[[*shapes, (1, height, width)]],
        img_mask=mask[None],
        return_dict=False,
    )
    return -output[0][0, -height * width :].T.reshape(-1, height, width)


def test_pictures_of_no_one_and_three_others_in_one_batch_equal_diffusers(dit, reference):
    for ours, one in zip(velocities(dit, MIXED), MIXED, strict=True):
        assert (ours - reference_velocity(reference, one)).abs().max() < 1e-5


def test_the_published_sizes_are_the_defaults(tmp_path):
    QWEN_IMAGE.write_full(tmp_path / "full")
    assert QwenImageNetwork.read_config(part_config(tmp_path / "full", "transformer")) == QwenImageConfig()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "Other"}, "is 'Other', not QwenImage21Transformer2DModel"),
        ({"causal_condition": False}, "causal_condition False; only True"),
        ({"out_channels": 8}, "out_channels 8; only 16"),
        ({"num_layers": None}, "no 'num_layers'"),
    ],
)
def test_a_transformer_of_another_kind_is_refused(reference, change, message):
    config = {**reference.config, "_class_name": "QwenImage21Transformer2DModel"} | change
    config = {name: value for name, value in config.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        QwenImageNetwork.read_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("transformer_blocks.1.attn.to_k.weight"), "lacks 1 parameters.*layers.1.qkv"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "'extra' that Qwen-Image has not"),
        (lambda weights: weights.update({"proj_out.weight": torch.zeros(1, 5)}), "'proj_out.weight' has the shape"),
    ],
)
def test_weights_that_do_not_fit_are_refused(reference, change, message):
    weights = dict(reference.state_dict())
    change(weights)
    with pytest.raises(ConfigError, match=message):
        QwenImageNetwork(TINY).load(weights.items())


def test_a_second_picture_of_512_pixels_can_join_the_first_in_the_pipeline_that_is_shipped():
    tokens = (512 // 16) ** 2
    stage = next(stage for stage in yaml.safe_load(YAML.read_text())["stages"] if stage["name"] == "dit")
    spec = PictureSpec((32, 32), 40, 0, Prefix(Condition(torch.zeros(300, 8), (300,))))
    for most in (stage["engine"]["max_num_batched_tokens"], SPEC.engine["max_num_batched_tokens"]):
        (_, last), *others = reversed(parts(spec.conditions, most))
        assert not others
        assert tokens + (tokens + last) <= most, "its first step computes its prompt, too"
