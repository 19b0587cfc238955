"""The families of pictures as users run them: launcher, stages, HTTP server; pictures are those of diffusers."""

from __future__ import annotations

import asyncio
import base64
import io
from contextlib import nullcontext
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image as Picture

from omni_actors.client import AsyncOmniClient, Image, Progress
from omni_actors.engine.models.qwen_image import written
from tests.support import flux2_klein, qwen_image, z_image_engine
from tests.support.nightly import nightly
from tests.support.picture_wishes import Wish, equal, params
from tests.support.servers import HttpPipeline
from tools.checkpoints.pictures import FLUX2_KLEIN, QWEN_IMAGE, Z_IMAGE

pytestmark = pytest.mark.e2e

PAINTED = {"z_image": Z_IMAGE, "qwen_image": QWEN_IMAGE, "flux2_klein": FLUX2_KLEIN}
SUPPORT = {"z_image": z_image_engine, "qwen_image": qwen_image, "flux2_klein": flux2_klein}
EDIT = qwen_image.WISHES[3]
LONG = {
    "z_image": Wish("kept", "the blue ship", 128, 128, 120, 2.0),
    "qwen_image": Wish("kept", "the blue ship", 96, 96, 120, 2.0, negative="ugly", references=((64, 96, 4),)),
    "flux2_klein": Wish("kept", "the blue ship", 96, 96, 120, 1.0, references=((64, 96, 3),)),
}


@pytest.fixture(scope="module", params=[nightly("z_image"), nightly("qwen_image"), "flux2_klein"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def painter(family):
    return SUPPORT[family].Painter(PAINTED[family].tiny_pipeline())


@pytest.fixture(scope="module")
def red(tmp_path_factory):
    """The folder of a LoRA adapter of FLUX.2."""
    folder = tmp_path_factory.mktemp("adapters") / "red"
    flux2_klein.write_adapter(folder, 1, ("attn.to_q", "to_qkv_mlp_proj"))
    return folder


@pytest.fixture(scope="module")
def running(family, request, red):
    options = {"model": request.getfixturevalue(f"tiny_{family}")}
    if family == "flux2_klein":
        options["adapters"] = {"red": str(red)}
    with HttpPipeline(f"stage_configs/tiny_{family}.yaml", options) as running:
        yield running


@pytest.fixture
def pipeline(running):
    """It holds nothing after a test."""
    yield running
    running.assert_idle()


def file_of(picture: Picture.Image) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, "PNG")
    return sink.getvalue()


def picture_of(answer: Any) -> np.ndarray:
    return np.asarray(Picture.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json))))


def prompt_of(wish: Wish) -> Any:
    """A text, or a message with pictures as files."""
    files = [{"type": "image", "image": file_of(picture)} for picture in wish.pictures]
    return [{"role": "user", "content": [*files, {"type": "text", "text": wish.prompt}]}] if files else wish.prompt


def given(wish: Wish) -> dict[str, dict[str, Any]]:
    return {"dit": params(wish)} | ({"prompt": {"negative_prompt": wish.negative}} if wish.negative is not None else {})


async def wanted(client: AsyncOmniClient, wish: Wish, kill: tuple[tuple[int, str], ...] = ()) -> list[Any]:
    """What a client gets; when so many steps are done, a stage is killed."""
    stream = await client.submit(prompt_of(wish), modalities=["image"], seed=wish.seed, params=given(wish), timeout=240)
    items, left = [], list(kill)
    async for item in stream:
        items.append(item)
        if left and isinstance(item, Progress) and item.step == left[0][0]:
            stages = (await client.describe()).stages
            psutil.Process(next(status.pid for status in stages if status.stage == left[0][1])).kill()
            left.pop(0)
    return items


def check(items: list[Any], wish: Wish, painter: Any) -> None:
    """Each step comes once, however often it was done, and the picture is that of diffusers."""
    pictures = [item for item in items if isinstance(item, Image)]
    assert [picture.preview for picture in pictures] == [True] * wish.previews + [False]
    assert equal(pictures[-1].pixels, painter.pixels(wish)), wish
    steps = [item.step for item in items if isinstance(item, Progress)]
    assert steps == (list(range(1, wish.steps + 1)) if wish.steps > 1 else [])


async def test_five_pictures_at_once_are_those_of_diffusers(pipeline, painter, family):
    wishes = SUPPORT[family].WISHES
    async with AsyncOmniClient(pipeline.endpoint) as client:
        answers = await asyncio.gather(*(wanted(client, wish) for wish in wishes))
    for wish, items in zip(wishes, answers, strict=True):
        check(items, wish, painter)


@pytest.mark.nightly
@pytest.mark.parametrize("kill", [((20, "dit"),), ((10, "text_encoder"), (60, "vae_encoder"), (61, "dit"))])
async def test_a_picture_is_the_same_when_stages_are_killed_between_two_of_its_steps(pipeline, painter, family, kill):
    """On both sides of a join, too: what one has sent is kept there; the other's is made again, from the prompt on."""
    kill = tuple((step, stage) for step, stage in kill if family != "z_image" or stage != "vae_encoder")
    async with AsyncOmniClient(pipeline.endpoint) as client:
        check(await wanted(client, LONG[family], kill), LONG[family], painter)


QWEN_IMAGE = pytest.mark.parametrize("family", [nightly("qwen_image")], indirect=True, scope="module")


@QWEN_IMAGE
def test_the_openai_client_edits_a_picture(pipeline, painter):
    (original,) = EDIT.pictures
    answer = pipeline.openai().images.edit(
        image=("picture.png", file_of(original)),
        prompt=EDIT.prompt,
        size=f"{EDIT.width}x{EDIT.height}",
        extra_body={"seed": EDIT.seed, "num_inference_steps": EDIT.steps},
    )
    assert equal(picture_of(answer), painter.pixels(EDIT))
    details = answer.usage.input_tokens_details
    assert details.image_tokens == 4 * 4, "the reference, scaled to 128 x 128, in tokens of 32 x 32"
    text = painter.pipeline.processor.tokenizer(written(EDIT.prompt, 1))["input_ids"]
    assert details.text_tokens == len(text) - 1
    assert answer.usage.input_tokens == len(text) - 1 + 4 * 4


@pytest.mark.parametrize("family", ["flux2_klein"], indirect=True, scope="module")
@pytest.mark.parametrize("adapter", [None, "red"])
def test_the_openai_client_makes_a_picture_of_two_others_and_one_of_text_with_an_adapter_or_without(
    pipeline, painter, adapter, red
):
    wishes = flux2_klein.WISHES
    for wish in (wishes[-1], wishes[0]):
        files = [(f"{index}.png", file_of(picture)) for index, picture in enumerate(wish.pictures)]
        asked = {
            "prompt": wish.prompt,
            "size": f"{wish.width}x{wish.height}",
            "extra_body": {"seed": wish.seed, "num_inference_steps": wish.steps},
            **({"model": adapter} if adapter else {}),
        }
        images = pipeline.openai().images
        answer = images.edit(image=files, **asked) if files else images.generate(**asked)
        with painter.adapted(red) if adapter else nullcontext():
            assert equal(picture_of(answer), painter.pixels(wish))
