"""Qwen-Image as users run it: launcher, five stages, two of which another joins, HTTP server; equal to diffusers."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
from PIL import Image as Picture

from omni_actors.client import AsyncOmniClient, Image, Progress
from omni_actors.engine.models.qwen_image.prompt_template import written
from omni_actors.errors import DeadlineExceeded, InvalidRequest, OmniError
from tests.support.picture_wishes import Wish, equal, params
from tests.support.qwen_image import WISHES, Painter
from tests.support.servers import HttpPipeline, close_clients
from tools.checkpoints.pictures import QWEN_IMAGE

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

FOX, EDIT = WISHES[0], WISHES[3]
LONG = Wish("kept", "the blue ship", 96, 96, 120, 2.0, negative="ugly", references=((64, 96, 4),))


@pytest.fixture(scope="module")
def painter() -> Painter:
    return Painter(QWEN_IMAGE.tiny_pipeline())


@pytest.fixture(scope="module")
def pipeline(tiny_qwen_image: Path) -> Iterator[HttpPipeline]:
    with HttpPipeline("stage_configs/tiny_qwen_image.yaml", {"model": tiny_qwen_image}) as running:
        yield running


def file_of(picture: Picture.Image) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, "PNG")
    return sink.getvalue()


def prompt_of(wish: Wish) -> Any:
    """A text, or a message with pictures as files."""
    files = [{"type": "image", "image": file_of(picture)} for picture in wish.pictures]
    return [{"role": "user", "content": [*files, {"type": "text", "text": wish.prompt}]}] if files else wish.prompt


def given(wish: Wish) -> dict[str, dict[str, Any]]:
    return {"dit": params(wish)} | ({"prompt": {"negative_prompt": wish.negative}} if wish.negative is not None else {})


async def wanted(client: AsyncOmniClient, wish: Wish, kill: Mapping[int, str] = {}) -> list[Any]:
    """What a client gets; when so many steps are done, a stage is killed."""
    stream = await client.submit(prompt_of(wish), modalities=["image"], seed=wish.seed, params=given(wish), timeout=240)
    killed: set[int] = set()
    items = []
    async for item in stream:
        items.append(item)
        if isinstance(item, Progress) and item.step in kill and item.step not in killed:
            killed.add(item.step)
            stages = (await client.describe()).stages
            psutil.Process(next(status.pid for status in stages if status.stage == kill[item.step])).kill()
    return items


def pictures_of(items: list[Any]) -> list[Image]:
    return [item for item in items if isinstance(item, Image)]


def steps_of(items: list[Any]) -> list[int]:
    return [item.step for item in items if isinstance(item, Progress)]


async def test_pictures_of_no_one_and_three_others_at_once_are_those_of_diffusers(pipeline, painter):
    async with AsyncOmniClient(pipeline.endpoint) as client:
        answers = await asyncio.gather(*(wanted(client, wish) for wish in WISHES))
    for wish, items in zip(WISHES, answers, strict=True):
        pictures = pictures_of(items)
        assert [picture.preview for picture in pictures] == [True] * wish.previews + [False]
        assert equal(pictures[-1].pixels, painter.pixels(wish)), wish
        assert steps_of(items) == (list(range(1, wish.steps + 1)) if wish.steps > 1 else [])
    pipeline.assert_idle()


async def test_a_picture_is_the_same_when_the_stage_of_its_steps_is_killed_between_two(pipeline, painter):
    async with AsyncOmniClient(pipeline.endpoint) as client:
        items = await wanted(client, LONG, {20: "dit"})
    assert steps_of(items) == list(range(1, LONG.steps + 1)), "each step once, although they were done again"
    (picture,) = pictures_of(items)
    assert equal(picture.pixels, painter.pixels(LONG))
    pipeline.assert_idle()


async def test_a_picture_is_the_same_when_stages_on_both_sides_of_the_join_are_killed(pipeline, painter):
    # What one side has sent is kept there; the other side's is made again, from the prompt on.
    async with AsyncOmniClient(pipeline.endpoint) as client:
        items = await wanted(client, LONG, {10: "text_encoder", 60: "vae_encoder", 61: "dit"})
    assert steps_of(items) == list(range(1, LONG.steps + 1))
    (picture,) = pictures_of(items)
    assert equal(picture.pixels, painter.pixels(LONG))
    pipeline.assert_idle()


async def test_what_a_client_leaves_or_its_deadline_ends_frees_all_stages(pipeline):
    endless = replace(LONG, steps=1000)
    async with AsyncOmniClient(pipeline.endpoint) as client:
        stream = await client.submit(prompt_of(endless), modalities=["image"], params=given(endless))
        async for item in stream:
            if isinstance(item, Progress):
                break
        await stream.abort()
        with pytest.raises(DeadlineExceeded):
            await client.generate(prompt_of(endless), modalities=["image"], params=given(endless), timeout=1.0)
    pipeline.assert_idle()


def test_the_openai_client_edits_a_picture(pipeline, painter):
    (original,) = EDIT.pictures
    answer = pipeline.openai().images.edit(
        image=("picture.png", file_of(original)),
        prompt=EDIT.prompt,
        size=f"{EDIT.width}x{EDIT.height}",
        extra_body={"seed": EDIT.seed, "num_inference_steps": EDIT.steps},
    )
    pixels = np.asarray(Picture.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json))))
    assert equal(pixels, painter.pixels(EDIT))
    details = answer.usage.input_tokens_details
    assert details.image_tokens == 4 * 4, "the reference, scaled to 128 x 128, in tokens of 32 x 32"
    text = painter.pipeline.processor.tokenizer(written(EDIT.prompt, 1))["input_ids"]
    assert details.text_tokens == len(text) - 1
    assert answer.usage.input_tokens == len(text) - 1 + 4 * 4
    close_clients()


@pytest.mark.parametrize(("background", "channels"), [("transparent", 4), ("auto", 4), ("opaque", 3)])
def test_a_picture_keeps_its_alpha_channel_unless_it_shall_be_opaque(pipeline, painter, background, channels):
    answer = pipeline.openai().images.generate(
        prompt=FOX.prompt,
        size=f"{FOX.width}x{FOX.height}",
        background=background,
        extra_body={"seed": FOX.seed, "num_inference_steps": FOX.steps},
    )
    pixels = np.asarray(Picture.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json))))
    expected = painter.pixels(FOX)
    assert pixels.shape == (*expected.shape[:2], channels)
    assert answer.background == ("opaque" if channels == 3 else "transparent")
    if channels == 4:
        assert equal(pixels, expected)
    else:
        white = 255 - expected[..., 3:] / 255 * (255 - expected[..., :3].astype(float))
        assert np.abs(pixels - white).max() < 2.5, "on white"
    close_clients()


def bomb() -> bytes:
    """A small file of a picture of 50,000 x 50,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("files", "status", "message"),
    [
        ([bomb()], 413, "2500000000 pixels"),
        ([b"GIF no picture"], 400, "not a PNG"),
        ([file_of(Picture.new("RGB", (32, 32)))] * 11, 400, "at most 10"),
    ],
)
def test_pictures_that_cannot_be_edited_are_refused_and_leave_nothing_behind(pipeline, files, status, message):
    named = [(f"{index}.png", file) for index, file in enumerate(files)]
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        pipeline.openai().images.edit(image=named, prompt="blue")
    assert caught.value.status_code == status
    close_clients()
    pipeline.assert_idle()


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "field", "message"),
    [
        ("A fox", {"dit": {"width": 48}}, InvalidRequest, "width", "a multiple of 32 from 32 to 4096; got 48"),
        ("A fox", {"dit": {"guidance_scale": 4.0}}, InvalidRequest, "guidance_scale", "needs a negative_prompt"),
        ("A fox", {"prompt": {"negative_prompt": "no"}}, InvalidRequest, "negative_prompt", "guidance_scale above 1"),
        ("A <|image_pad|>", {}, InvalidRequest, None, "contains <|image_pad|> 1 times".replace("|", r"\|")),
        (" ", {}, InvalidRequest, "prompt", "empty"),
        ("A fox", {"vae_encoder": {"width": 64}}, InvalidRequest, "width", "no parameter 'width'"),
        ("word " * 3000, {}, OmniError, None, "tokens; at most 2047 fit"),
    ],
)
async def test_what_the_model_does_not_take_is_refused(pipeline, prompt, params, kind, field, message):
    async with AsyncOmniClient(pipeline.endpoint) as client:
        with pytest.raises(kind, match=message) as caught:
            await client.generate(prompt, modalities=["image"], params=params)
    assert caught.value.field == field
    pipeline.assert_idle()
