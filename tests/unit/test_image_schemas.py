"""Bodies of the routes for pictures: OpenAI's fields are known, and each goes to the stages that take it; PNG files."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy
import numpy as np
import pytest
from openai.types import VideoCreateParams, image_edit_params, image_generate_params
from PIL import Image

from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.images import (
    EDIT,
    GENERATION,
    ImageRequest,
    background_of,
    encoded_image,
    flattened,
    params_of,
)
from omni_actors.http_server.videos import BODY
from omni_actors.protocol.messages import Description
from omni_actors.protocol.payloads import Parameter, StageParams

DECLARED = {
    "encoder": (Parameter("negative_prompt", "text"), Parameter("guidance_scale", "float")),
    "dit": (
        Parameter("width", "int"),
        Parameter("height", "int"),
        Parameter("num_steps", "int"),
        Parameter("guidance_scale", "float"),
        Parameter("previews", "int"),
    ),
    "vae": (),
}


def request(**fields: Any) -> ImageRequest:
    return msgspec.json.decode(msgspec.json.encode({"prompt": "x", **fields}), type=ImageRequest)


def drawing(parameters: dict[str, tuple[Parameter, ...]], adapters: tuple[str, ...] = ()) -> Description:
    """A pipeline whose models declare these parameters."""
    return Description("p", "m", ("image",), (), 0, True, 0, 9, (), parameters=parameters, adapters=adapters)


def test_every_field_of_openai_is_known() -> None:
    """A field that is new there shows up here, until it is decided what it means here."""
    generate = image_generate_params.ImageGenerateParamsBase.__annotations__
    assert len(generate) > 15
    assert not set(generate) - set(GENERATION.kind.__struct_fields__)
    edit = image_edit_params.ImageEditParamsBase.__annotations__
    assert set(edit) - set(EDIT.kind.__struct_fields__) == {"image", "mask"}
    videos = VideoCreateParams.__annotations__
    assert set(videos) - set(BODY.kind.__struct_fields__) == {"input_reference"}


def test_each_field_goes_to_all_stages_that_declare_it() -> None:
    fields = {"size": "64x32", "num_inference_steps": 4, "guidance_scale": 2, "negative_prompt": "fog"}
    assert params_of(request(**fields, stream=True, partial_images=2), drawing(DECLARED)) == {
        "encoder": StageParams(negative_prompt="fog", guidance_scale=2.0),
        "dit": StageParams(width=64, height=32, num_steps=4, guidance_scale=2.0, previews=2),
    }
    assert params_of(request(size="auto", background="opaque", partial_images=0), drawing(DECLARED)) == {}


def test_parameters_by_stage_win_and_the_models_own_are_kept() -> None:
    given = {"dit": {"num_steps": 9, "extra_args": {"shift": 3}}}
    own = {"dit": (*DECLARED["dit"], Parameter("background", "text"))}
    assert params_of(request(num_inference_steps=4, background="transparent", stage_params=given), drawing(own)) == {
        "dit": StageParams(num_steps=9, extra_args={"background": "transparent", "shift": 3})
    }


def test_an_adapter_goes_to_the_stages_that_take_one() -> None:
    known = drawing({"dit": (Parameter("adapter", "text"),), "vae": ()}, adapters=("style",))
    assert params_of(request(model="style"), known) == {"dit": StageParams(adapter="style")}
    assert params_of(request(model="p"), known) == {}
    with pytest.raises(HttpError, match="takes no model") as caught:
        params_of(request(model="style"), drawing(DECLARED, adapters=("style",)))
    assert caught.value.param == "model"


@pytest.mark.parametrize("field", [{"background": "transparent"}, {"size": "64x64"}, {"guidance_scale": 1}])
def test_what_no_stage_takes_is_refused(field: dict) -> None:
    (name,) = field
    with pytest.raises(HttpError, match=f"This model takes no {name}; it takes num_inference_steps") as caught:
        params_of(request(**field), drawing({"dit": (Parameter("num_steps", "int"),)}))
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_a_picture_is_put_on_white() -> None:
    pixels = numpy.array([[[255, 0, 0, 255], [255, 0, 0, 0], [0, 0, 0, 128]]], numpy.uint8)
    assert flattened(pixels).tolist() == [[[255, 0, 0], [255, 255, 255], [127, 127, 127]]]
    assert background_of(pixels) == "transparent"
    assert background_of(flattened(pixels)) == background_of(pixels[:, :1]) == "opaque"


def picture(height: int, width: int, channels: int) -> np.ndarray:
    """A gradient with noise, as a photograph has it."""
    steps = np.add.outer(np.arange(height), np.arange(width))[..., None] // 3
    return (steps + np.random.default_rng(0).integers(0, 24, (height, width, channels))).astype(np.uint8)


@pytest.mark.parametrize("size", [(1, 1, 3), (3, 5, 4), (64, 1, 4), (1, 700, 3), (512, 512, 4), (700, 900, 3)])
def test_a_file_has_the_pixels_of_its_picture(size: tuple[int, int, int]) -> None:
    pixels = picture(*size)
    with Image.open(io.BytesIO(encoded_image(pixels, "png"))) as opened:
        opened.load()
        assert opened.format == "PNG"
        assert np.array_equal(np.asarray(opened), pixels)
