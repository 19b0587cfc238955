"""Pictures wanted of Qwen-Image, and what diffusers makes of the same."""

from __future__ import annotations

from typing import Any

import torch

from omni_actors.engine.models.qwen_image import scaled_size
from omni_actors.engine.rows import to_host
from omni_actors.stage.engine_interface import StageInputs
from tests.support import picture_wishes
from tests.support.picture_wishes import Wish

REFERENCE_SIZE = 128  # of the tiny pipeline
# Sizes, steps and guidance of all kinds; pictures made of none, one and three others, with alpha channels and without.
WISHES = (
    Wish("fox", "A red fox in the snow", 64, 96, 8, 1.0),
    Wish("ship", "the blue ship", 128, 64, 1, 5.0, negative="ugly"),
    Wish("x", "x", 32, 32, 50, 2.0, previews=2, negative=""),
    Wish("one", "make it blue", 96, 64, 8, 1.0, references=((160, 128, 4),)),
    Wish("three", "all of them", 64, 64, 2, 3.0, negative="no", references=((50, 90, 3), (200, 77, 4), (64, 64, 3))),
)


class Painter(picture_wishes.Painter):
    """diffusers' pipeline, with noise from the seed of a wish."""

    def paint(self, wish: Wish, kind: str) -> Any:
        scheduler = self.pipeline.scheduler
        terminal = scheduler.config.shift_terminal
        if wish.steps == 1:  # diffusers would divide by zero
            scheduler.register_to_config(shift_terminal=None)
        try:
            return super().paint(wish, kind)
        finally:
            scheduler.register_to_config(shift_terminal=terminal)

    def given(self, wish: Wish) -> dict[str, Any]:
        guided = {"negative_prompt": wish.negative, "true_cfg_scale": wish.guidance}
        return {"image": wish.pictures or None, "output_resolution": REFERENCE_SIZE, **guided}

    def latents(self, wish: Wish) -> torch.Tensor:
        return super().latents(wish).T.reshape(-1, wish.height // 16, wish.width // 16)

    @torch.no_grad()
    def references(self, wish: Wish) -> list[torch.Tensor]:
        """The latents of the pictures that a wish is made of."""
        processor = self.pipeline.image_processor
        found = []
        for picture in wish.pictures:
            width, height = scaled_size(*picture.size, REFERENCE_SIZE)
            pixels = processor.preprocess(picture.convert("RGBA"), width=width, height=height)
            found.append(self.encoded(pixels[0]))
        return found

    @torch.no_grad()
    def encoded(self, levels: torch.Tensor) -> torch.Tensor:
        """The latents [channels, height, width] of a picture [4, height, width], -1 to 1."""
        vae = self.pipeline.vae
        latents = vae.encode(levels[None, :, None]).latent_dist.mode()[0, :, 0]
        mean, spread = (torch.tensor(vae.config[name]).view(-1, 1, 1) for name in ("latents_mean", "latents_std"))
        return (latents - mean) / spread

    @torch.no_grad()
    def states(self, wish: Wish, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states of the text of a prompt, and the lengths of its runs between the pictures."""
        processor = self.pipeline.image_processor
        pictures = []
        for picture in wish.pictures:
            width, height = scaled_size(*picture.size, REFERENCE_SIZE)
            pictures.append(processor.resize(picture.convert("RGBA"), width=width, height=height))
        (states,), _, (mask,) = self.pipeline.encode_prompt(prompt, image=pictures or None)
        runs, length = [], 0
        for index, shown in enumerate(mask.tolist()):
            if shown and not mask[index - 1]:
                runs.append(length)
                length = 0
            length += not shown
        return states[~mask], torch.tensor([*runs, length], dtype=torch.int32)

    def inputs(self, wish: Wish) -> StageInputs:
        """What the encoders send for a wish."""
        tensors: dict[str, torch.Tensor] = {}
        tensors["states"], tensors["states_runs"] = self.states(wish, wish.prompt)
        if wish.negative is not None:
            tensors["negative_states"], tensors["negative_states_runs"] = self.states(wish, wish.negative)
        tensors |= {f"reference_{index}": latents for index, latents in enumerate(self.references(wish))}
        return StageInputs(tensors={name: to_host(tensor) for name, tensor in tensors.items()})
