"""Pictures that someone wants, the engines of stages that make them, and requests for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import EngineEvent, StageRequest
from tests.support.reference import one_thread


@dataclass(frozen=True)
class Wish:
    """A picture that someone wants; `references` are width, height and channels of those it is made of."""

    name: str
    prompt: str
    width: int
    height: int
    steps: int
    guidance: float
    previews: int = 0
    negative: str | None = None
    references: tuple[tuple[int, int, int], ...] = ()

    @property
    def seed(self) -> int:
        return sum(self.name.encode())

    @property
    def pictures(self) -> list[Image.Image]:
        """Those that it is made of: noise, which differs from wish to wish."""
        noise = np.random.default_rng(self.seed)
        return [
            Image.fromarray(noise.integers(0, 256, (height, width, channels), dtype=np.uint8))
            for width, height, channels in self.references
        ]


class Painter:
    """diffusers' pipeline of a family, with noise from the seed of a wish; a subclass says what else it is given."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        pipeline.set_progress_bar_config(disable=True)

    def paint(self, wish: Wish, kind: str) -> Any:
        """The latents (`latent`) or the picture, 0 to 1 [height, width, channels] (`np`), as the pipeline has them."""
        with one_thread():
            return self.pipeline(
                prompt=wish.prompt,
                width=wish.width,
                height=wish.height,
                num_inference_steps=wish.steps,
                generator=torch.Generator().manual_seed(wish.seed),
                output_type=kind,
                **self.given(wish),
            ).images[0]

    def given(self, wish: Wish) -> dict[str, Any]:
        return {"guidance_scale": wish.guidance}

    def latents(self, wish: Wish) -> torch.Tensor:
        """Latents f32 [channels, height, width] as the network has them."""
        latents: torch.Tensor = self.paint(wish, "latent")
        return latents

    def pixels(self, wish: Wish) -> np.ndarray:
        return (self.paint(wish, "np") * 255).round().astype(np.uint8)


def engine(checkpoint: Path, stage: str, *, asynchronous: bool | None = None, **options: Any) -> DiffusionEngine:
    adapters = options.pop("adapters", {})
    model = OmniModelConfig(str(checkpoint), stage, budget_bytes=options.pop("budget", 1 << 40), adapters=adapters)
    given = {"dtype": "float32", **options}
    return DiffusionEngine(OmniEngineArgs(model, "diffusion", given, asynchronous=asynchronous))


def params(wish: Wish) -> dict[str, Any]:
    return {
        "width": wish.width,
        "height": wish.height,
        "num_steps": wish.steps,
        "guidance_scale": wish.guidance,
        "previews": wish.previews,
    }


def request(wish: Wish, **others: Any) -> StageRequest:
    return StageRequest(wish.name, StageParams(**params(wish) | others), seed=wish.seed)


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


def equal(pixels: np.ndarray, expected: np.ndarray) -> bool:
    """Whether two pictures u8 differ by at most one level."""
    return pixels.shape == expected.shape and np.abs(pixels.astype(int) - expected.astype(int)).max() <= 1
