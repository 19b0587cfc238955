"""Pictures in progress: their latents, and a step of any mix of them in one batch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omni_actors.engine.models.pictures.network import PackedNetwork, Size
from omni_actors.engine.models.pictures.packing import moved
from omni_actors.engine.models.pictures.schedule import FlowSchedule


@dataclass(frozen=True)
class PictureSpec:
    """What a picture is made from; it stays the same from its first step to its last.

    Args:
        size: in tokens.
        num_steps: denoising steps.
        seed: of the noise.
        condition: what it is to show, as the network takes it: the states of a prompt, and whatever goes with them.
        guidance: how much further than its condition, away from the negative one; 0 for none.
        negative: the condition that it is not to show; None without guidance.
        previews: how many of its steps show what the picture would become.
    """

    size: Size
    num_steps: int
    seed: int
    condition: Any
    guidance: float = 0.0
    negative: Any = None
    previews: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the picture alone."""
        return self.size[0] * self.size[1]

    @property
    def conditions(self) -> list[Any]:
        """One for each sequence that it has in a batch: two with guidance."""
        return [self.condition] if self.negative is None else [self.condition, self.negative]

    def shows_after(self, step: int) -> bool:
        """Whether a preview follows step number `step`, from 1; they are spread evenly, and none follows the last."""
        if step >= self.num_steps:
            return False
        spread = self.previews + 1
        return step * spread // self.num_steps > (step - 1) * spread // self.num_steps


@dataclass(frozen=True)
class Preparation:
    """A part of what a picture's conditions contribute that has a step of its own, before those of the picture.

    Args:
        compute: does it; once more, it does nothing.
    """

    compute: Callable[[], None]


@dataclass
class Picture:
    """A picture in progress.

    Args:
        patches: its latents as tokens, f32 [tokens, patch_width], on the device.
        conditions: what each of its sequences contributes to every step.
        sigmas: f32 [num_steps + 1], on the CPU.
        done: steps.
    """

    spec: PictureSpec
    patches: torch.Tensor
    conditions: list[Any]
    sigmas: torch.Tensor
    done: int = 0


class Denoiser:
    """Takes pictures through their steps.

    Args:
        network: predicts velocities.
        schedule: of the shares of noise.
    """

    def __init__(self, network: PackedNetwork, schedule: FlowSchedule) -> None:
        self.network = network
        self.schedule = schedule
        self._members: list[Picture] = []  # of the last batch
        self._batch: Any = None

    @torch.inference_mode()
    def begin(self, spec: PictureSpec) -> Picture:
        """A picture of pure noise. The noise is drawn on the CPU, so that it is the same on every device."""
        generator = torch.Generator().manual_seed(spec.seed)
        network = self.network
        height, width = (edge * network.patch for edge in spec.size)
        noise = torch.randn((network.channels, height, width), generator=generator)
        return Picture(
            spec,
            moved(network.patches_of(noise).contiguous(), network.device),
            network.condition(spec.conditions),
            self.schedule.sigmas(spec.num_steps, spec.tokens),
        )

    def latents(self, picture: Picture) -> torch.Tensor:
        """A picture's latents, f32 [channels, height, width]."""
        return self.network.latents_of(picture.patches, picture.spec.size)

    @torch.inference_mode()
    def step(self, pictures: Sequence[Picture]) -> list[torch.Tensor | None]:
        """Take each picture, none of which is done, one step further.

        Returns:
            For each the latents of its preview, f32 [channels, height, width], if it is to show one now.
        """
        velocities = self._velocities(pictures) if pictures else []
        previews: list[torch.Tensor | None] = []
        for picture, velocity in zip(pictures, velocities, strict=True):
            before, after = picture.sigmas[picture.done].item(), picture.sigmas[picture.done + 1].item()
            shown = None
            if picture.spec.shows_after(picture.done + 1):
                shown = self.network.latents_of(picture.patches + before * velocity, picture.spec.size)
            picture.patches = picture.patches + (before - after) * velocity
            picture.done += 1
            previews.append(shown)
        return previews

    def _velocities(self, pictures: Sequence[Picture]) -> list[torch.Tensor]:
        """Towards the picture, f32 [tokens, patch_width] for each, with guidance applied."""
        branches = [(picture, condition) for picture in pictures for condition in picture.conditions]
        same = len(pictures) == len(self._members) and all(map(operator.is_, pictures, self._members))
        if self._batch is None or not same:  # most steps are of the same pictures as the one before
            sizes = [picture.spec.size for picture, _ in branches]
            self._batch = self.network.lay_out(sizes, [condition for _, condition in branches])
            self._members = list(pictures)
        moments = self.schedule.moments(torch.stack([picture.sigmas[picture.done] for picture, _ in branches]))
        patches = torch.cat([picture.patches for picture, _ in branches])
        velocities = iter(
            self.network(patches, moved(moments, self.network.device), self._batch)
            .float()
            .split([picture.spec.tokens for picture, _ in branches])
        )
        result = []
        for picture in pictures:
            velocity = next(velocities)
            if len(picture.conditions) == 2:
                velocity = velocity + picture.spec.guidance * (velocity - next(velocities))
            result.append(velocity)
        return result

    def forget(self) -> None:
        """Free the layout of the last batch; called when one of its pictures has ended."""
        self._batch, self._members = None, []
