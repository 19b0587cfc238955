"""The moments of a picture's steps: a straight flow from noise to picture, solved by Euler's method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from omni_actors.errors import ConfigError

CLASS_NAME = "FlowMatchEulerDiscreteScheduler"
# What else a published configuration may switch on; those of these models do not.
_MUST_BE_OFF = (
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
        terminal: the share before the last step, towards which all are stretched; 0 to leave them.
        rising: whether the network takes the moments from 0 (noise) to 1; else it takes the shares of noise.
        fixed: the shares of noise before each step and before they are shifted, where the number of steps is fixed.
    """

    shift: float = 1.0
    by_size: tuple[int, float, int, float] = (256, 0.5, 4096, 1.15)
    dynamic: bool = False
    train_steps: int = 1000
    terminal: float = 0.0
    rising: bool = True
    fixed: tuple[float, ...] = ()

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, rising: bool = True, fixed: tuple[float, ...] = ()
    ) -> FlowSchedule:
        """The schedule that a checkpoint's scheduler_config.json describes; for `rising` and `fixed` see the class.

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
            terminal=config.get("shift_terminal") or 0.0,
            rising=rising,
            fixed=fixed,
        )

    def sigmas(self, num_steps: int, tokens: int) -> torch.Tensor:
        """The share of noise before each step and after the last: f32 [num_steps + 1], from 1 to 0.

        Args:
            tokens: of the picture.
        """
        # In the precision of diffusers, whose shares these have to be.
        line = torch.tensor(self.fixed) if self.fixed else torch.linspace(1.0, 1 / num_steps, num_steps)
        if self.dynamic:
            low, low_shift, high, high_shift = self.by_size
            slope = (high_shift - low_shift) / (high - low)
            factor = torch.tensor(math.exp(tokens * slope + low_shift - slope * low))  # torch divides floats inexactly
            shifted = factor / (factor + (1 / line - 1))
        else:
            shifted = self.shift * line / (1 + (self.shift - 1) * line)
        if self.terminal and line[-1] < 1.0:  # a single step has nothing to stretch
            shifted = 1.0 - (1.0 - shifted) / ((1.0 - shifted[-1]) / (1.0 - self.terminal))
        return torch.cat((shifted, torch.zeros(1)))

    def moments(self, sigmas: torch.Tensor) -> torch.Tensor:
        """What the network is given for shares of noise, in [0, 1]."""
        if not self.rising:
            return sigmas
        return (self.train_steps - sigmas * self.train_steps) / self.train_steps
