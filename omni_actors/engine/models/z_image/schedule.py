"""The moments of a picture's steps: a straight flow from noise to picture, solved by Euler's method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from omni_actors.errors import ConfigError

CLASS_NAME = "FlowMatchEulerDiscreteScheduler"
# What else a published configuration may switch on; Z-Image does not.
_MUST_BE_OFF = (
    "shift_terminal",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "stochastic_sampling",
)


@dataclass(frozen=True)
class FlowSchedule:
    """How the share of noise falls from step to step.

    Args:
        shift: how long the noise stays high; 1 is a straight line.
        by_size: with `dynamic`, the shift grows with the picture: its logarithm goes from the second of these at the
            first number of tokens to the fourth at the third.
        dynamic: whether it does.
        train_steps: the unit in which moments are given to the network.
    """

    shift: float = 1.0
    by_size: tuple[int, float, int, float] = (256, 0.5, 4096, 1.15)
    dynamic: bool = False
    train_steps: int = 1000

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FlowSchedule:
        """The schedule that a checkpoint's scheduler_config.json describes.

        Raises:
            ConfigError: it asks for another kind of schedule.
        """
        name = config.get("_class_name", CLASS_NAME)
        if name != CLASS_NAME:
            raise ConfigError(f"The checkpoint's scheduler is {name}; this model is served with {CLASS_NAME} only.")
        if wrong := [key for key in _MUST_BE_OFF if config.get(key)]:
            raise ConfigError(f"The checkpoint's scheduler sets {wrong[0]}, which is not supported.")
        if config.get("time_shift_type", "exponential") != "exponential":
            raise ConfigError("The checkpoint's scheduler has a time_shift_type that is not supported.")
        return cls(
            shift=config.get("shift", 1.0),
            by_size=(
                config.get("base_image_seq_len", 256),
                config.get("base_shift", 0.5),
                config.get("max_image_seq_len", 4096),
                config.get("max_shift", 1.15),
            ),
            dynamic=config.get("use_dynamic_shifting", False),
            train_steps=config.get("num_train_timesteps", 1000),
        )

    def sigmas(self, num_steps: int, tokens: int) -> torch.Tensor:
        """The share of noise before each step and after the last: f32 [num_steps + 1], from 1 to 0.

        Args:
            tokens: of the picture.
        """
        line = torch.linspace(1.0, 1 / num_steps, num_steps)
        if self.dynamic:
            low, low_shift, high, high_shift = self.by_size
            slope = (high_shift - low_shift) / (high - low)
            factor = math.exp(tokens * slope + low_shift - slope * low)
            shifted = factor / (factor + (1 / line - 1))
        else:
            shifted = self.shift * line / (1 + (self.shift - 1) * line)
        return torch.cat((shifted, torch.zeros(1)))

    def moments(self, sigmas: torch.Tensor) -> torch.Tensor:
        """The moments that the network is given, in [0, 1], for shares of noise."""
        return (self.train_steps - sigmas * self.train_steps) / self.train_steps
