"""Pictures wanted of FLUX.2 klein, and what diffusers makes of the same."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from omni_actors.engine.rows import to_host
from omni_actors.stage.engine_interface import StageInputs
from tests.support import picture_wishes
from tests.support.picture_wishes import Wish
from tools.checkpoints.pictures import FLUX2_KLEIN

# Sizes and steps of all kinds; pictures made of none, one and two others. Guidance is for checkpoints that have it.
WISHES = (
    Wish("fox", "A red fox in the snow", 64, 96, 4, 1.0),
    Wish("ship", "the blue ship", 128, 64, 1, 5.0),
    Wish("x", "x", 32, 32, 12, 1.0, previews=2),
    Wish("one", "make it blue", 96, 64, 4, 4.0, references=((161, 128, 3),)),
    Wish("two", "all of them", 64, 64, 2, 1.0, references=((70, 90, 3), (200, 77, 3))),
)


def write_adapter(folder: Path, seed: int, targets: Sequence[str]) -> None:
    """Save a LoRA adapter as those are who train with diffusers."""
    from diffusers import Flux2KleinPipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    transformer = FLUX2_KLEIN.tiny_transformer()
    config = LoraConfig(r=2 + seed, lora_alpha=8, target_modules=list(targets))
    transformer.add_adapter(config)
    noise = torch.Generator().manual_seed(seed)
    layers = {
        name: torch.randn(matrix.shape, generator=noise) / 8
        for name, matrix in get_peft_model_state_dict(transformer).items()
    }
    Flux2KleinPipeline.save_lora_weights(
        folder, transformer_lora_layers=layers, transformer_lora_adapter_metadata=config.to_dict()
    )


class Painter(picture_wishes.Painter):
    """diffusers' pipeline, with noise from the seed of a wish. Each prompt, which is 512 tokens, is encoded once."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        pipeline.encode_prompt = functools.cache(pipeline.encode_prompt)

    def given(self, wish: Wish) -> dict[str, Any]:
        return {"image": wish.pictures or None, "guidance_scale": wish.guidance}

    @contextmanager
    def adapted(self, folder: Path) -> Iterator[None]:
        """Meanwhile with a LoRA adapter."""
        self.pipeline.load_lora_weights(folder)
        try:
            yield
        finally:
            self.pipeline.unload_lora_weights()

    def latents(self, wish: Wish) -> torch.Tensor:
        return self._normed(super().latents(wish))

    def _normed(self, given: torch.Tensor) -> torch.Tensor:
        """The VAE's latents [channels, height, width] as the network has them."""
        norm, latents = self.pipeline.vae.bn, torch.nn.functional.pixel_unshuffle(given[None], 2)
        mean, spread = norm.running_mean, torch.sqrt(norm.running_var + self.pipeline.vae.config.batch_norm_eps)
        return ((latents - mean.view(1, -1, 1, 1)) / spread.view(1, -1, 1, 1))[0]

    @torch.no_grad()
    def encoded(self, levels: torch.Tensor) -> torch.Tensor:
        """The latents [channels, height, width] of a picture [3, height, width], -1 to 1."""
        return self._normed(self.pipeline.vae.encode(levels[None]).latent_dist.mode()[0])

    def references(self, wish: Wish) -> list[torch.Tensor]:
        """The latents of the pictures that a wish is made of."""
        processor, found = self.pipeline.image_processor, []
        for picture in wish.pictures:
            width, height = (edge // 16 * 16 for edge in picture.size)
            found.append(self.encoded(processor.preprocess(picture, height=height, width=width, resize_mode="crop")[0]))
        return found

    @torch.no_grad()
    def states(self, prompt: str) -> torch.Tensor:
        """The states [512, 3 * width] of a prompt."""
        states: torch.Tensor = self.pipeline.encode_prompt(prompt)[0][0]
        return states

    def inputs(self, wish: Wish) -> StageInputs:
        """What the encoders send for a wish."""
        tensors = {"states": self.states(wish.prompt), "negative_states": self.states("")}
        tensors |= {f"reference_{index}": latents for index, latents in enumerate(self.references(wish))}
        return StageInputs(tensors={name: to_host(tensor) for name, tensor in tensors.items()})
