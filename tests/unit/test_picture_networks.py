"""Networks of pictures without an engine: what is refused, schedules, prefixes in parts, references; against diffusers.

What the networks compute is compared in tests/e2e/diffusion/test_pictures.py.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from diffusers.pipelines.z_image.pipeline_z_image import calculate_shift
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from omni_actors.engine.models.flux2 import reference_picture
from omni_actors.engine.models.flux2.dit import Flux2Network
from omni_actors.engine.models.pictures.denoising import FlowSchedule, PictureSpec
from omni_actors.engine.models.qwen_image.dit import Prefix, QwenImageNetwork, parts
from omni_actors.engine.models.qwen_image.stages import SPEC
from omni_actors.engine.models.z_image.dit import ZImageNetwork
from omni_actors.errors import ConfigError, InvalidRequest, StartupError
from tests.support.paths import REPOSITORY
from tools.checkpoints.pictures import FLUX2_KLEIN, QWEN_IMAGE, Z_IMAGE

FAMILIES = {
    "Z-Image": (ZImageNetwork, Z_IMAGE),
    "Qwen-Image": (QwenImageNetwork, QWEN_IMAGE),
    "FLUX.2": (Flux2Network, FLUX2_KLEIN),
}


def written(model: Any) -> dict[str, Any]:
    """What diffusers writes to config.json."""
    config: dict[str, Any] = json.loads(model.to_json_string())
    return config


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("FLUX.2", {"_class_name": "Other"}, "is 'Other', not Flux2Transformer2DModel"),
        ("FLUX.2", {"attention_head_dim": 64}, "attention_head_dim 64; only 32"),
        ("Qwen-Image", {"causal_condition": False}, "causal_condition False; only True"),
        ("Qwen-Image", {"num_layers": None}, "no 'num_layers'"),
        ("Z-Image", {"qk_norm": False}, "qk_norm False; only True"),
    ],
)
def test_a_transformer_of_another_kind_is_refused(family: str, change: dict[str, Any], message: str) -> None:
    network, checkpoint = FAMILIES[family]
    config = written(checkpoint.tiny_transformer()) | change
    with pytest.raises(ConfigError, match=message):
        network({name: value for name, value in config.items() if value is not None})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.1.attention.to_k.weight": None}, r"Z-Image.*missing \['layers.1.qkv.weight \(part 1\)'\]"),
        ({"extra": torch.zeros(1)}, r"unexpected \['extra'\]"),
        ({"x_pad_token": torch.zeros(1, 5)}, r"another shape \['x_pad_token'\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    reference = Z_IMAGE.tiny_transformer()
    weights = {name: value for name, value in {**reference.state_dict(), **change}.items() if value is not None}
    with pytest.raises(StartupError, match=message):
        ZImageNetwork(written(reference)).load(weights.items())


SIZED = {"use_dynamic_shifting": True, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}


@pytest.mark.parametrize("config", [{"shift": 3.0}, SIZED, {"use_dynamic_shifting": True}])
def test_the_shares_of_noise_and_the_moments_are_those_of_the_pipelines_of_diffusers(config: dict[str, Any]) -> None:
    """The last schedule has FLUX.2's own shift."""
    flux2, reference = len(config) == 1, FlowMatchEulerDiscreteScheduler(**config)
    named = reference.config
    schedule = FlowSchedule.from_config(named, log_shift=compute_empirical_mu if flux2 else None)
    for steps, tokens in itertools.product((2, 50), (1, 1024, 16_384)):
        sizes = (named.base_image_seq_len, named.max_image_seq_len, named.base_shift, named.max_shift)
        mu = compute_empirical_mu(tokens, steps) if flux2 else calculate_shift(tokens, *sizes)
        reference.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        sigmas = schedule.sigmas(steps, tokens)
        assert (sigmas - reference.sigmas).abs().max() < 1e-6
        assert (schedule.moments(sigmas[:-1]) - (1000 - reference.timesteps) / 1000).abs().max() < 1e-6
    assert schedule.sigmas(1, 12).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("config", [{"_class_name": "DDIMScheduler"}, {"invert_sigmas": True}])
def test_another_kind_of_schedule_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="The checkpoint's scheduler"):
        FlowSchedule.from_config(config)


prefixes = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6), st.integers(1, 8)), min_size=1, max_size=4).map(
    lambda drawn: Prefix(
        torch.zeros(sum(length for length, _, _ in drawn), 2),
        [length for length, _, _ in drawn],
        [torch.zeros(3, height, width) for _, height, width in drawn[:-1]],
    )
)


@given(given=st.lists(prefixes, min_size=1, max_size=2), most=st.integers(1, 60))
def test_parts_are_as_large_as_a_step_allows_and_cut_no_picture(given: list[Prefix], most: int) -> None:
    cut = parts(given, most)
    for part, tokens in cut:
        found = 0
        for prefix, end in part:
            runs = prefix.until(end)
            assert [run.end for run in runs] == [*(run.begin for run in runs[1:]), end], "without a gap"
            for run in runs:
                assert run.text or run.end - run.begin == run.given[0].numel(), "pictures are whole"
                assert not run.text or len(run.given) == run.end - run.begin
            found += end - prefix.done
            prefix.done = end
        assert found == tokens
        assert tokens <= most or (len(part) == 1 and not runs[-1].text and len(runs) == 1)
    assert [prefix.done for prefix in given] == [len(prefix) for prefix in given]
    assert all(one + other > most for (_, one), (_, other) in itertools.pairwise(cut)), "no more than are needed"


def test_a_second_picture_of_512_pixels_can_join_the_first_in_the_pipeline_that_is_shipped() -> None:
    tokens = (512 // 16) ** 2
    shipped = yaml.safe_load((REPOSITORY / "stage_configs" / "qwen_image.yaml").read_text())
    stage = next(stage for stage in shipped["stages"] if stage["name"] == "dit")
    spec = PictureSpec((32, 32), 40, 0, Prefix(torch.zeros(300, 8)))
    for most in (stage["engine"]["max_num_batched_tokens"], SPEC["dit"].engine["max_num_batched_tokens"]):
        ((_, last),) = parts(spec.conditions, most)
        assert tokens + (tokens + last) <= most, "its first step computes its prompt, too"


@pytest.mark.parametrize(("size", "mode"), [((160, 128), "RGB"), ((1500, 1100), "RGBA"), ((77, 500), "RGBA")])
def test_references_of_flux2_are_scaled_and_cut_as_diffusers_does_it(size: tuple[int, int], mode: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], len(mode)), dtype=np.uint8)
    noise[..., 3:] = 255
    image = theirs = Image.fromarray(noise)
    if size[0] * size[1] > 1024 * 1024:  # as the pipeline does it
        scale = (1024 * 1024 / (size[0] * size[1])) ** 0.5
        theirs = image.resize((int(size[0] * scale), int(size[1] * scale)), Image.Resampling.LANCZOS)
    width, height = (edge // 16 * 16 for edge in theirs.size)
    processor = Flux2ImageProcessor(vae_scale_factor=16)
    levels = processor.preprocess(theirs, height=height, width=width, resize_mode="crop")[0]
    ours = torch.from_numpy(np.array(reference_picture(image.convert("RGBA")))).permute(2, 0, 1) / 255 * 2 - 1
    assert ours.shape == levels.shape
    assert (ours - levels).abs().max() < 1e-6


@pytest.mark.parametrize("size", [(63, 100), (900, 100)])
def test_pictures_that_diffusers_refuses_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match=f"{size[0]} x {size[1]}"):
        reference_picture(Image.new("RGBA", size))
