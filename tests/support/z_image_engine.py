"""Engines of Z-Image's stages in this process, requests for them, and what diffusers makes of the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.engine.tensors import to_host
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import EngineEvent, StageInputs, StageRequest
from tests.support.reference import one_thread

if TYPE_CHECKING:
    from diffusers import ZImagePipeline


@dataclass(frozen=True)
class Wish:
    """A picture that someone wants."""

    name: str
    prompt: str
    width: int
    height: int
    steps: int
    guidance: float
    previews: int = 0

    @property
    def seed(self) -> int:
        return sum(self.name.encode())


# Five sizes, step counts and strengths of guidance; two are not made of a multiple of 32 tokens.
WISHES = (
    Wish("fox", "A red fox in the snow", 64, 96, 8, 0.0),
    Wish("ship", "the blue ship", 128, 64, 1, 5.0),
    Wish("x", "x", 32, 32, 50, 2.0, previews=2),
    Wish("user", "user assistant", 80, 48, 2, 0.0),
    Wish("long", "a long one " * 10, 32, 64, 200, 0.0),
)


def engine(checkpoint: Path, stage: str, **options: Any) -> DiffusionEngine:
    model = OmniModelConfig(str(checkpoint), stage, latent_budget_bytes=options.pop("budget", 1 << 40))
    return DiffusionEngine(OmniEngineArgs(model, "diffusion", {"dtype": "float32", **options}))


class Painter:
    """diffusers' pipeline, with noise from the seed of a wish."""

    def __init__(self, pipeline: ZImagePipeline) -> None:
        self.pipeline = pipeline
        pipeline.set_progress_bar_config(disable=True)

    def paint(self, wish: Wish, kind: str) -> Any:
        """The latents f32 [channels, height, width] (`latent`) or the picture, 0 to 1 [height, width, 3] (`np`)."""
        with one_thread():
            return self.pipeline(
                wish.prompt,
                width=wish.width,
                height=wish.height,
                num_inference_steps=wish.steps,
                guidance_scale=wish.guidance,
                generator=torch.Generator().manual_seed(wish.seed),
                output_type=kind,
            ).images[0]

    def latents(self, wish: Wish) -> torch.Tensor:
        return self.paint(wish, "latent")

    def pixels(self, wish: Wish) -> np.ndarray:
        return (self.paint(wish, "np") * 255).round().astype(np.uint8)

    @torch.no_grad()
    def inputs(self, wish: Wish) -> StageInputs:
        """The hidden states of the wish's prompts, as the text encoder sends them."""
        states, negative = self.pipeline.encode_prompt(wish.prompt, do_classifier_free_guidance=True)
        return StageInputs(tensors={"states": to_host(states[0]), "negative_states": to_host(negative[0])})


def request(wish: Wish, **params: Any) -> StageRequest:
    given: dict[str, Any] = {
        "width": wish.width,
        "height": wish.height,
        "num_steps": wish.steps,
        "guidance_scale": wish.guidance,
        "previews": wish.previews,
    }
    return StageRequest(wish.name, StageParams(**given | params), seed=wish.seed)


def run(
    engine: DiffusionEngine, between: Callable[[int], None] = lambda step: None, most: int = 1000
) -> list[EngineEvent]:
    """Events until the engine is idle; `between` is called before each step with its number."""
    events: list[EngineEvent] = []
    with one_thread():
        for step in range(most):
            between(step)
            if not engine.runnable():
                return events
            events += engine.step()
    pytest.fail("the engine does not become idle")
