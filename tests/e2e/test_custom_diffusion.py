"""A picture model of a third party: the worked example of docs/extending.md, a plugin, compared with diffusers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_actors.client import AsyncOmniClient, Image, OmniClient, Progress
from omni_actors.errors import InvalidRequest
from tests.support.paths import REPOSITORY
from tests.support.pipelines import RunningPipeline
from tests.support.reference import one_thread

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.nightly]

EXAMPLES = REPOSITORY / "examples"
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")])),
    "OMNI_ACTORS_ALLOW_IMPORTS": "custom_diffusion",
}
LABELS = ["circle", "square", "star"]
WISHES = [("circle", 20, 1), ("star", 1, 2), ("square", 7, 3), ("star", 50, 4)]  # label, steps, seed


@pytest.fixture(scope="module")
def tiny_painter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = tmp_path_factory.mktemp("painter") / "tiny_painter"
    subprocess.run(
        [sys.executable, "-m", "custom_diffusion.tiny", str(checkpoint)],
        check=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, **ENVIRONMENT},
    )
    return checkpoint


@pytest.fixture(scope="module")
def pipeline(tiny_painter: Path) -> Iterator[RunningPipeline]:
    configuration = EXAMPLES / "custom_diffusion" / "tiny.yaml"
    with RunningPipeline(configuration, {"model": tiny_painter}, environment=ENVIRONMENT) as running:
        yield running


@torch.no_grad()
def painted(checkpoint: Path, label: str, steps: int, seed: int) -> np.ndarray:
    """What diffusers makes of the same, alone."""
    from diffusers import DDIMScheduler, UNet2DModel

    unet, schedule = (
        UNet2DModel.from_pretrained(checkpoint / "unet"),
        DDIMScheduler.from_pretrained(checkpoint / "scheduler"),
    )
    schedule.set_timesteps(steps)
    picture = torch.randn((1, 3, 16, 16), generator=torch.Generator().manual_seed(seed))
    with one_thread():
        for moment in schedule.timesteps:
            noise = unet(picture, moment, torch.tensor([LABELS.index(label)])).sample
            picture = schedule.step(noise, moment, picture).prev_sample
    levels = (picture[0] / 2 + 0.5).clamp(0, 1) * 255
    return levels.round().to(torch.uint8).permute(1, 2, 0).numpy()


async def items_of(client: AsyncOmniClient, label: str, steps: int, seed: int) -> list[Any]:
    params = {"painter": {"num_steps": steps}}
    return [item async for item in await client.submit(label, modalities=["image"], seed=seed, params=params)]


async def test_pictures_of_a_plugins_model_that_share_their_steps_are_those_of_diffusers(pipeline, tiny_painter):
    async with AsyncOmniClient(pipeline.endpoint) as client:
        answers = await asyncio.gather(*(items_of(client, *wish) for wish in WISHES))
    for wish, items in zip(WISHES, answers, strict=True):
        assert [item.step for item in items if isinstance(item, Progress)] == list(range(1, wish[1] + 1))
        (picture,) = [item for item in items if isinstance(item, Image)]
        assert np.abs(picture.pixels.astype(int) - painted(tiny_painter, *wish).astype(int)).max() <= 1, wish
    pipeline.assert_idle()


@pytest.mark.parametrize(
    ("label", "params", "field", "message"),
    [
        ("moon", {}, "prompt", "one of circle, square, star; got 'moon'"),
        ("star", {"num_steps": 501}, "num_steps", "from 1 to 500; got 501"),
        ("star", {"width": 64}, "width", "has no parameter 'width'"),
    ],
)
def test_what_a_plugins_model_does_not_paint_is_refused(pipeline, label, params, field, message):
    with OmniClient(pipeline.endpoint) as client, pytest.raises(InvalidRequest, match=message) as caught:
        client.generate(label, modalities=["image"], params={"painter": params})
    assert caught.value.field == field
