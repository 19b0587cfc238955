"""Pictures over HTTP: OpenAI's fields are known, each goes to the stages that take it. The usage of all answers."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy
import pytest
from openai.types import VideoCreateParams, image_edit_params, image_generate_params

from omni_actors.http_server.answer import usage_of
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.images import EDIT, GENERATION, ImageRequest, background_of, flattened, params_of
from omni_actors.http_server.videos import BODY
from omni_actors.protocol.messages import Description, FinishReason, StageStatus, StageUsage
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


# Tokens read and written by each stage. A vocoder counts steps, a stage that changes audio counts pieces.
WORK = {"prompt": (0, 5), "thinker": (5, 7), "talker": (9, 40), "code2wav": (40, 100), "leveller": (3, 3)}
SPEAKING = ["prompt", "thinker", "talker", "code2wav"]
BOTH = {"text": "thinker", "audio": "code2wav"}


def description(order: list[str], outputs: dict[str, str]) -> Description:
    stages = tuple(StageStatus(name, replica, 1, "ready", 1, 0) for name in order for replica in (0, 1))
    return Description(
        "p", "m", tuple(outputs), (), 24_000, True, in_flight=1, max_in_flight=1, stages=stages, outputs=outputs
    )


@pytest.mark.parametrize(
    ("order", "outputs", "ran", "audio_tokens"),
    [
        (SPEAKING, BOTH, SPEAKING, 40),
        (SPEAKING, BOTH, SPEAKING[:2], 0),
        ([*SPEAKING, "leveller"], {"text": "thinker", "audio": "leveller"}, [*SPEAKING, "leveller"], 40),
        (["prompt", "talker", "code2wav"], {"audio": "code2wav"}, ["prompt", "talker", "code2wav"], 40),
        (["prompt", "thinker", "code2wav"], BOTH, ["prompt", "thinker", "code2wav"], 0),
    ],
)
def test_audio_tokens_are_those_generated_for_the_audio(
    order: list[str], outputs: dict[str, str], ran: list[str], audio_tokens: int
) -> None:
    reported = {
        name: StageUsage(FinishReason.STOP, input_tokens=WORK[name][0], output_tokens=WORK[name][1]) for name in ran
    }
    shown = usage_of([reported], description(order, outputs))
    text_tokens = 7 if "text" in outputs else 0
    assert shown["completion_tokens_details"] == {"text_tokens": text_tokens, "audio_tokens": audio_tokens}
    assert shown["completion_tokens"] == text_tokens + audio_tokens
    assert shown["prompt_tokens"] == (5 if "text" in outputs else 0)
    assert shown["total_tokens"] == shown["prompt_tokens"] + shown["completion_tokens"]
    assert list(shown["stages"]) == ran
