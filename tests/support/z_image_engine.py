"""Pictures wanted of Z-Image, and what diffusers makes of the same."""

from __future__ import annotations

import torch

from omni_actors.engine.rows import to_host
from omni_actors.stage.engine_interface import StageInputs
from tests.support import picture_wishes
from tests.support.picture_wishes import Wish

# Five sizes, step counts and strengths of guidance; two are not made of a multiple of 32 tokens.
WISHES = (
    Wish("fox", "A red fox in the snow", 64, 96, 8, 0.0),
    Wish("ship", "the blue ship", 128, 64, 1, 5.0),
    Wish("x", "x", 32, 32, 50, 2.0, previews=2),
    Wish("user", "user assistant", 80, 48, 2, 0.0),
    Wish("long", "a long one " * 10, 32, 64, 60, 0.0),
)


class Painter(picture_wishes.Painter):
    """diffusers' pipeline, with noise from the seed of a wish."""

    @torch.no_grad()
    def inputs(self, wish: Wish) -> StageInputs:
        """The hidden states of the wish's prompts, as the text encoder sends them."""
        states, negative = self.pipeline.encode_prompt(wish.prompt, do_classifier_free_guidance=True)
        return StageInputs(tensors={"states": to_host(states[0]), "negative_states": to_host(negative[0])})
