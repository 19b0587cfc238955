"""Z-Image as users run it: launcher, three stages, HTTP server; pictures compared with those of diffusers."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image as Picture

from omni_actors.client import AsyncOmniClient, Image, OmniClient, Progress
from omni_actors.errors import DeadlineExceeded, InvalidRequest
from tests.support.picture_wishes import Wish, equal, params
from tests.support.servers import HttpPipeline, close_clients
from tests.support.z_image_engine import WISHES, Painter
from tools.checkpoints.pictures import Z_IMAGE

pytestmark = pytest.mark.e2e

FOX = WISHES[0]
LONG = Wish("kept", "the blue ship", 128, 128, 120, 2.0)


@pytest.fixture(scope="module")
def painter() -> Painter:
    return Painter(Z_IMAGE.tiny_pipeline())


@pytest.fixture(scope="module")
def pipeline(tiny_z_image: Path) -> Iterator[HttpPipeline]:
    with HttpPipeline("stage_configs/tiny_z_image.yaml", {"model": tiny_z_image}) as running:
        yield running


async def wanted(client: AsyncOmniClient, wish: Wish, kill: int = 0) -> list[Any]:
    """What a client gets; the stage of the steps is killed when so many are done."""
    stream = await client.submit(
        wish.prompt, modalities=["image"], seed=wish.seed, params={"dit": params(wish)}, timeout=240
    )
    items = []
    async for item in stream:
        items.append(item)
        if kill and isinstance(item, Progress) and item.step == kill:
            stages = (await client.describe()).stages
            psutil.Process(next(status.pid for status in stages if status.stage == "dit")).kill()
            kill = 0
    return items


async def test_five_pictures_at_once_are_those_of_diffusers(pipeline, painter):
    async with AsyncOmniClient(pipeline.endpoint) as client:
        answers = await asyncio.gather(*(wanted(client, wish) for wish in WISHES))
    for wish, items in zip(WISHES, answers, strict=True):
        pictures = [item for item in items if isinstance(item, Image)]
        assert [picture.preview for picture in pictures] == [True] * wish.previews + [False]
        assert equal(pictures[-1].pixels, painter.pixels(wish)), wish
        steps = [item.step for item in items if isinstance(item, Progress)]
        assert steps == (list(range(1, wish.steps + 1)) if wish.steps > 1 else [])
    pipeline.assert_idle()


@pytest.mark.nightly
async def test_a_picture_is_the_same_when_its_stage_is_killed_between_two_steps(pipeline, painter):
    async with AsyncOmniClient(pipeline.endpoint) as client:
        items = await wanted(client, LONG, kill=20)
    steps = [item.step for item in items if isinstance(item, Progress)]
    assert steps == list(range(1, LONG.steps + 1)), "each step once, although they were done again"
    (picture,) = [item for item in items if isinstance(item, Image)]
    assert equal(picture.pixels, painter.pixels(LONG))
    pipeline.assert_idle()


@pytest.mark.nightly
async def test_what_a_client_leaves_or_its_deadline_ends_frees_all_stages(pipeline):
    endless = replace(LONG, steps=1000)
    async with AsyncOmniClient(pipeline.endpoint) as client:
        stream = await client.submit(endless.prompt, modalities=["image"], params={"dit": params(endless)})
        async for item in stream:
            if isinstance(item, Progress):
                break
        await stream.abort()
        with pytest.raises(DeadlineExceeded):
            await client.generate(endless.prompt, modalities=["image"], params={"dit": params(endless)}, timeout=1.0)
    pipeline.assert_idle()


def test_the_openai_client_gets_the_same_picture(pipeline, painter):
    extra = {"seed": FOX.seed, "num_inference_steps": FOX.steps, "guidance_scale": FOX.guidance}
    size = f"{FOX.width}x{FOX.height}"
    answer = pipeline.openai().images.generate(prompt=FOX.prompt, size=size, extra_body=extra)
    pixels = np.asarray(Picture.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json))))
    assert equal(pixels[..., :3], painter.pixels(FOX))
    close_clients()


@pytest.mark.parametrize(
    ("stage", "params", "field", "message"),
    [
        ("dit", {"width": 65}, "width", "a multiple of 16 from 16 to 1024; got 65"),
        ("dit", {"sway_coefficient": 1.0}, "sway_coefficient", "has no parameter 'sway_coefficient'"),
        ("vae", {"width": 64}, "width", "has no parameter 'width'"),
        ("text_encoder", {"width": 64}, "width", "width"),
    ],
)
def test_parameters_that_a_stage_does_not_take_are_refused_at_admission(pipeline, stage, params, field, message):
    with OmniClient(pipeline.endpoint) as client, pytest.raises(InvalidRequest, match=message) as caught:
        client.generate("A fox", modalities=["image"], params={stage: params})
    assert caught.value.field == field
