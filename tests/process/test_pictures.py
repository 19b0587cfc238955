"""Pictures through real processes: many at a time, of every size, and when a stage is killed on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy
import psutil
import pytest
from PIL import Image as Pillow

from omni_actors.client import AsyncOmniClient, Image, Progress, RequestStream
from omni_actors.config import Modality, StageConfig, StageKind
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.echo import EchoEngine
from omni_actors.stage.engine_interface import ImageEvent, StageInputs, StageRequest
from tests.support.launcher import launched
from tests.support.nightly import nightly
from tests.support.waiting import until

DIT: dict[str, Any] = {"name": "dit", "kind": "echo", "engine": {"latents": True, "step_seconds": 0.005}}
VAE: dict[str, Any] = {"name": "vae", "kind": "echo", "outputs": ["image"]}
DRAWING = {
    "name": "drawing",
    "model": "echo",
    "coordinator": {"heartbeat_interval": 0.1},
    "stages": [
        {**DIT, "outputs": ["latents"], "sampling": {"guidance_scale": 1.5}},
        {**VAE, "inputs": {"from": "dit", "processor": "latents2image"}},
    ],
}


@pytest.fixture(scope="module")
def drawing_launcher():
    with launched(DRAWING, loses_stages=True) as launcher:
        yield launcher


@pytest.fixture
def drawing(drawing_launcher):
    """A pipeline that draws; healthy and idle again after each test."""
    yield drawing_launcher
    until(lambda: drawing_launcher.describe().healthy, 20, "every stage is ready")
    drawing_launcher.wait_idle()


def expected(prompt: str, seed: int, **params: Any) -> list:
    engine = EchoEngine(StageConfig(name="dit", kind=StageKind.ECHO, outputs=[Modality.IMAGE]))
    request = StageRequest("r", StageParams(guidance_scale=1.5, **params), seed)
    engine.start(request, StageInputs(token_ids=list(prompt.encode())))
    while engine.runnable():
        for event in engine.step():
            if isinstance(event, ImageEvent) and not event.preview:
                return numpy.frombuffer(event.pixels.data, "u1").reshape(event.pixels.shape).tolist()
    raise AssertionError("no picture")


async def start(client: AsyncOmniClient, prompt: str, seed: int, **params: Any) -> RequestStream:
    return await client.submit(prompt, modalities=["image"], seed=seed, params={"dit": params})


async def until_step(stream: RequestStream, step: int) -> None:
    async for item in stream:
        if isinstance(item, Progress) and item.step >= step:
            return


async def test_pictures_of_many_sizes_and_steps_come_out_as_each_does_alone(drawing):
    params = [
        {"width": 8 * (1 + number % 5), "height": 8 * (1 + number % 3), "num_steps": 1 + number % 7, "previews": 1}
        for number in range(60)
    ]
    async with AsyncOmniClient(drawing.endpoint) as client:
        streams = [await start(client, f"p{number}", number, **own) for number, own in enumerate(params)]
        results = await asyncio.gather(*(stream.result() for stream in streams))
    for number, (own, result) in enumerate(zip(params, results, strict=True)):
        (picture,) = result.images
        assert picture.tolist() == expected(f"p{number}", number, **own)
        assert result.finish_reasons == {"dit": "stop", "vae": "stop"}


async def test_large_pictures_wait_for_a_client_that_is_busy(drawing):
    """They have 16 MiB each, as much as may be on its way to a client."""
    large = {"width": 2048, "height": 2048, "num_steps": 1, "extra_args": {"background": "transparent"}}
    async with AsyncOmniClient(drawing.endpoint) as client:
        streams = [await start(client, f"p{number}", number, **large) for number in range(8)]
        await asyncio.sleep(0)
        until(lambda: drawing.describe().in_flight == 0, 10, "all are drawn")  # holds up this client's event loop
        pictures = [picture for stream in streams for picture in (await stream.result()).images]
    assert [picture.shape for picture in pictures] == [(2048, 2048, 4)] * 8


async def test_latents_are_an_answer_of_their_own(drawing):
    async with AsyncOmniClient(drawing.endpoint) as client:
        assert (await client.describe()).modalities == ("latents", "image")
        result = await client.generate("fox", modalities=["latents"], params={"dit": {"width": 16, "height": 8}})
    (latents,) = result.latents
    assert latents.validate().shape == (4, 1, 2)
    assert result.images == []
    assert set(result.usage) == {"dit"}, "nothing is decoded"


@pytest.mark.parametrize("stage", ["dit", nightly("vae")])
async def test_a_stage_that_is_killed_at_a_step_gives_the_same_picture_once(drawing, stage):
    params = {"num_steps": 60, "previews": 3, "width": 16}
    async with AsyncOmniClient(drawing.endpoint) as client:
        stream = await start(client, "fox", 5, **params)
        await until_step(stream, 30)
        psutil.Process(drawing.pid_of(stage)).kill()
        items = [item async for item in stream]
    steps = [item.step for item in items if isinstance(item, Progress)]
    assert steps == sorted(set(steps)), "no step comes again"
    assert steps[-1] == 60
    previews = [item for item in items if isinstance(item, Image) and item.preview]
    assert len(previews) <= 3
    (picture,) = [item for item in items if isinstance(item, Image) and not item.preview]
    assert picture.pixels.tolist() == expected("fox", 5, **params)


@pytest.mark.nightly
def test_a_picture_on_the_command_line_is_saved(launch, short_path):
    file = short_path / "fox.webp"
    launcher = launch(DRAWING, "--prompt", "fox", "--seed", "5", "--save-image", str(file))
    assert launcher.wait_end(20) == 0, launcher.output
    assert f"wrote a picture of 64 x 64 pixels to {file}" in launcher.output
    with Pillow.open(file) as picture:
        assert (picture.format, picture.size) == ("WEBP", (64, 64))
