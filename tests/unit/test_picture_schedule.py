"""Tests of the moments of a picture's steps against diffusers', and of where its previews lie."""

from __future__ import annotations

import pytest
import torch

from omni_actors.engine.models.pictures.denoising import FlowSchedule
from omni_actors.errors import ConfigError

CONFIGS = [
    {"shift": 3.0, "use_dynamic_shifting": False},
    {"shift": 6.0, "use_dynamic_shifting": False},
    {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192},
    {"use_dynamic_shifting": True, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_shares_of_noise_are_those_of_diffusers(config):
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.z_image.pipeline_z_image import calculate_shift

    reference = FlowMatchEulerDiscreteScheduler(**config)
    schedule = FlowSchedule.from_config(reference.config)
    for steps in (1, 2, 8, 50, 1000):
        for tokens in (1, 12, 1024, 16_384):  # of 12 follows a shift that floats cannot divide by itself
            if steps == 1 and schedule.terminal:  # diffusers divides by zero
                assert schedule.sigmas(1, tokens).tolist() == [1.0, 0.0]
                continue
            line = torch.linspace(1.0, 1 / steps, steps).tolist()
            named = reference.config
            mu = calculate_shift(
                tokens, named.base_image_seq_len, named.max_image_seq_len, named.base_shift, named.max_shift
            )
            reference.set_timesteps(sigmas=line, mu=mu)
            sigmas = schedule.sigmas(steps, tokens)
            assert (sigmas - reference.sigmas).abs().max() < 1e-6
            assert (schedule.moments(sigmas[:-1]) - (1000 - reference.timesteps) / 1000).abs().max() < 1e-6


@pytest.mark.parametrize(
    "config", [{"_class_name": "DDIMScheduler"}, {"use_karras_sigmas": True}, {"time_shift_type": "linear"}]
)
def test_another_kind_of_schedule_is_refused(config):
    with pytest.raises(ConfigError, match="The checkpoint's scheduler"):
        FlowSchedule.from_config(config)
