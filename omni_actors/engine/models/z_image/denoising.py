"""Pictures in progress: their latents, and a step of any mix of them in one batch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omni_actors.engine.models.z_image.dit import PATCH, Batch, Dit, Prompt, latents_of, patches_of
from omni_actors.engine.models.z_image.packing import moved
from omni_actors.engine.models.z_image.schedule import FlowSchedule


@dataclass(frozen=True)
class PictureSpec:
    """What a picture is made from; it stays the same from its first step to its last.

    Args:
        height: of the latents, even.
        width: of the latents, even.
        num_steps: denoising steps.
        seed: of the noise.
        guidance: how much further than its prompt, away from the negative prompt; 0 for none.
        states: hidden states of the prompt [tokens, text_width], on the CPU.
        negative_states: those of the negative prompt; None without guidance.
        previews: how many of its steps show what the picture would become.
    """

    height: int
    width: int
    num_steps: int
    seed: int
    states: torch.Tensor
    guidance: float = 0.0
    negative_states: torch.Tensor | None = None
    previews: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the picture alone."""
        return self.height // PATCH * (self.width // PATCH)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in tokens."""
        return self.height // PATCH, self.width // PATCH

    @property
    def branches(self) -> int:
        """Sequences that it has in a batch: two with guidance."""
        return 1 if self.negative_states is None else 2

    def shows_after(self, step: int) -> bool:
        """Whether a preview follows step number `step`, from 1; they are spread evenly, and none follows the last."""
        if step >= self.num_steps:
            return False
        spread = self.previews + 1
        return step * spread // self.num_steps > (step - 1) * spread // self.num_steps


@dataclass
class Picture:
    """A picture in progress.

    Args:
        patches: its latents as tokens, f32 [tokens, patch_width], on the device.
        prompts: that of each branch.
        sigmas: f32 [num_steps + 1], on the CPU.
        done: steps.
    """

    spec: PictureSpec
    patches: torch.Tensor
    prompts: list[Prompt]
    sigmas: torch.Tensor
    done: int = 0

    def latents(self, patches: torch.Tensor | None = None) -> torch.Tensor:
        """The latents, f32 [channels, height, width]; of other tokens than its own if they are given."""
        return latents_of(self.patches if patches is None else patches, self.spec.height, self.spec.width)


class Denoiser:
    """Takes pictures through their steps.

    Args:
        dit: the network.
        schedule: of the shares of noise.
    """

    def __init__(self, dit: Dit, schedule: FlowSchedule) -> None:
        self.dit = dit
        self.schedule = schedule
        self._members: list[Picture] = []  # of the last batch
        self._batch: Batch | None = None

    @torch.inference_mode()
    def begin(self, spec: PictureSpec) -> Picture:
        """A picture of pure noise. The noise is drawn on the CPU, so that it is the same on every device."""
        generator = torch.Generator().manual_seed(spec.seed)
        noise = torch.randn((self.dit.config.channels, spec.height, spec.width), generator=generator)
        states = [spec.states] if spec.negative_states is None else [spec.states, spec.negative_states]
        return Picture(
            spec,
            moved(patches_of(noise).contiguous(), self.dit.device),
            self.dit.refine_text(states),
            self.schedule.sigmas(spec.num_steps, spec.tokens),
        )

    @torch.inference_mode()
    def step(self, pictures: Sequence[Picture]) -> list[torch.Tensor | None]:
        """Take each picture, none of which is done, one step further.

        Returns:
            For each the latents of its preview, f32 [channels, height, width], if it is to show one now.
        """
        velocities = self._velocities(pictures)
        previews: list[torch.Tensor | None] = []
        for picture, velocity in zip(pictures, velocities, strict=True):
            before, after = picture.sigmas[picture.done].item(), picture.sigmas[picture.done + 1].item()
            shown = None
            if picture.spec.shows_after(picture.done + 1):
                shown = picture.latents(picture.patches + before * velocity)
            picture.patches = picture.patches + (before - after) * velocity
            picture.done += 1
            previews.append(shown)
        return previews

    def _velocities(self, pictures: Sequence[Picture]) -> list[torch.Tensor]:
        """Towards the picture, f32 [tokens, patch_width] for each, with guidance applied."""
        branches = [(picture, prompt) for picture in pictures for prompt in picture.prompts]
        same = len(pictures) == len(self._members) and all(map(operator.is_, pictures, self._members))
        if self._batch is None or not same:  # most steps are of the same pictures as the one before
            sizes = [picture.spec.size for picture, _ in branches]
            self._batch = self.dit.lay_out(sizes, [prompt for _, prompt in branches])
            self._members = list(pictures)
        moments = self.schedule.moments(torch.stack([picture.sigmas[picture.done] for picture, _ in branches]))
        patches = torch.cat([picture.patches for picture, _ in branches])
        velocities = iter(
            self.dit(patches, moved(moments, self.dit.device), self._batch)
            .float()
            .split([picture.spec.tokens for picture, _ in branches])
        )
        result = []
        for picture in pictures:
            velocity = next(velocities)
            if picture.spec.branches == 2:
                velocity = velocity + picture.spec.guidance * (velocity - next(velocities))
            result.append(velocity)
        return result

    def forget(self) -> None:
        """Free the layout of the last batch; called when one of its pictures has ended."""
        self._batch, self._members = None, []
