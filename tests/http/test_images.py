"""Pictures: the unchanged `openai` package with echo stages, whose pictures depend on all that a request says."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import httpx
import numpy
import openai
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from omni_actors.http_server.app import create_app
from omni_actors.http_server.settings import ServerSettings
from tests.support.servers import HttpPipeline, picture, serving
from tests.support.waiting import until


def decoded(b64_json: str | None) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(b64_json or "")))


def png_that_claims(width: int, height: int) -> bytes:
    """A file of a few bytes whose header says that it is large."""

    def chunk(data: bytes) -> bytes:
        return struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))

    head = chunk(b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT" + zlib.compress(b"")) + chunk(b"IEND")


def test_pictures_of_a_prompt_have_seeds_that_count_up(pictures: HttpPipeline) -> None:
    client = pictures.openai().images
    answer = client.generate(prompt="a fox", n=8, size="128x64", extra_body={"seed": 7})
    first, *_, last = made = [one.b64_json for one in answer.data]
    assert len(set(made)) == 8
    assert decoded(first).size == (128, 64)
    assert (answer.size, answer.output_format, answer.background) == ("128x64", "png", "opaque")
    alone = client.generate(prompt="a fox", size="128x64", extra_body={"seed": 14})
    assert alone.data[0].b64_json == last
    assert answer.usage.input_tokens == 5
    assert answer.usage.output_tokens == 8 * (128 // 16) * (64 // 16)
    assert answer.usage.total_tokens == 5 + answer.usage.output_tokens


def test_every_field_reaches_the_model(pictures: HttpPipeline) -> None:
    plain = {"prompt": "a fox", "extra_body": {"seed": 1}}
    changes = [
        {"prompt": "a red fox"},
        {"extra_body": {"seed": 2}},
        {"extra_body": {"seed": 1, "negative_prompt": "fog"}},
        {"extra_body": {"seed": 1, "guidance_scale": 2.5}},
    ]
    by_stage = {"extra_body": {"seed": 1, "stage_params": {"dit": {"guidance_scale": 2.5}}}}
    first, again, guided, *others = (
        pictures.openai().images.generate(**{**plain, **changed}).data[0].b64_json
        for changed in ({}, {}, by_stage, *changes)
    )
    assert first == again
    assert len({first, *others}) == 1 + len(changes)
    assert guided == others[-1]


def test_the_formats_of_files(pictures: HttpPipeline) -> None:
    def made(**options: object) -> str:
        answer = pictures.openai().images.generate(prompt="a fox", extra_body={"seed": 1}, **options)
        assert answer.output_format == options.get("output_format", "png")
        return answer.data[0].b64_json

    lossless = numpy.asarray(decoded(made()), int)
    for name in ("png", "jpeg", "webp"):
        data = made(output_format=name)
        assert decoded(data).format == name.upper()
        assert numpy.abs(numpy.asarray(decoded(data).convert("RGB"), int) - lossless).mean() < 6
        assert name == "png" or len(made(output_format=name, output_compression=5)) < len(data)


def test_a_stream_has_previews_or_progress_and_then_the_picture(pictures: HttpPipeline) -> None:
    options = {"prompt": "a fox", "size": "64x128", "extra_body": {"seed": 1, "num_inference_steps": 8}}
    client = pictures.openai().images
    *previews, last = client.generate(**options, stream=True, partial_images=3)
    assert [event.type for event in previews] == ["image_generation.partial_image"] * 3
    assert [event.partial_image_index for event in previews] == [0, 1, 2]
    assert last.type == "image_generation.completed"
    assert last.b64_json == client.generate(**options).data[0].b64_json
    assert (last.size, last.usage.output_tokens) == ("64x128", 4 * 8)
    final = numpy.asarray(decoded(last.b64_json), int)
    distances = [numpy.abs(numpy.asarray(decoded(event.b64_json), int) - final).mean() for event in previews]
    assert distances == sorted(distances, reverse=True), "each preview is nearer"
    assert distances[-1] > 0
    body = {"progress": True, "num_inference_steps": 5}
    *progress, last = [event.to_dict() for event in client.generate(prompt="a fox", stream=True, extra_body=body)]
    found = [(event["type"], event["step"], event["steps"], event["stage"]) for event in progress]
    assert found == [("image_generation.progress", step, 5, "dit") for step in range(1, 6)]
    assert last["type"] == "image_generation.completed"


def test_pictures_are_counted_without_their_previews(pictures: HttpPipeline) -> None:
    def totals() -> dict[str, float]:
        names = ("omni_pictures", "omni_stage_pictures", "omni_time_to_first_picture_seconds")
        found = text_string_to_metric_families(httpx.get(f"{pictures.url}/metrics").text)
        counted = {family.name: family.samples for family in found if family.name in names}
        return {
            name: sum(one.value for one in samples if one.name.endswith(("_total", "_count")))
            for name, samples in counted.items()
        }

    # A stage says with its next heartbeat what it has counted.
    until(lambda: len(set(totals().values())) == 1, what=lambda: f"what was made before is counted: {totals()}")
    before = totals()
    list(pictures.openai().images.generate(prompt="a fox", stream=True, partial_images=2))
    after = {name: total + 1 for name, total in before.items()}
    until(lambda: totals() == after, what=lambda: f"one picture more than {before} is counted: {totals()}")
    assert len(before) == 3


def test_an_edit_depends_on_all_of_its_pictures_and_a_mask_is_one_that_the_model_knows_as_such(
    pictures: HttpPipeline,
) -> None:
    client = pictures.openai().images
    one, other, mask = ("a.png", picture(64, 64)), ("b.jpg", picture(32, 32, "JPEG")), ("m.png", picture(32, 32))
    options = {"prompt": "blue", "size": "64x64", "extra_body": {"seed": "1"}}
    asked = [{"image": image} for image in (one, other, [one, other], [one, mask])]
    made = [client.edit(**options, **each).data[0].b64_json for each in (*asked, {"image": one, "mask": mask})]
    assert len(set(made)) == 5
    assert decoded(made[0]).size == (64, 64)
    *previews, last = client.edit(prompt="blue", image=one, stream=True, partial_images=1)
    assert [event.type for event in previews] == ["image_edit.partial_image"]
    assert (last.type, last.usage.input_tokens) == ("image_edit.completed", 4)


def test_references_that_are_none_or_too_large(pictures: HttpPipeline) -> None:
    client = pictures.openai().images
    with pytest.raises(openai.BadRequestError) as caught:
        client.edit(prompt="blue", image=("a.png", b"not a picture"))
    assert (caught.value.param, caught.value.code) == ("image", "malformed_media")
    with pytest.raises(openai.APIStatusError) as large:
        client.edit(prompt="blue", image=("a.png", png_that_claims(50_000, 50_000)))
    assert (large.value.status_code, large.value.code) == (413, "media_too_large")
    with pytest.raises(openai.BadRequestError) as many:
        client.edit(prompt="blue", image=[("a.png", picture(8, 8))] * 17)
    assert many.value.status_code == 400
    with pytest.raises(openai.BadRequestError, match="image: the field is missing"):
        client.edit(prompt="blue", image=[])
    one = ("a.png", picture())
    for fields, files, words in (
        ({}, {"image": one, "style": one}, "Only image and mask may be a file"),
        ({}, {"image": one, "mask": ("m.png", b"not a picture")}, '"param":"mask","code":"malformed_media"'),
        ({"mask": "a"}, {"image": one}, '"param":"mask","code":"invalid_value"'),
    ):
        answer = httpx.post(f"{pictures.url}/v1/images/edits", data={"prompt": "blue", **fields}, files=files)
        assert (answer.status_code, words in answer.text.replace(" ", "") or words in answer.text) == (400, True), words


def test_pictures_come_as_urls_that_need_no_key(picture_pipeline: HttpPipeline) -> None:
    settings = ServerSettings(endpoint=picture_pipeline.endpoint, api_key="secret")
    with serving(create_app(settings)) as url:
        asked = {"prompt": "a", "size": "64x32", "output_format": "webp", "response_format": "url"}
        asked |= {"quality": "hd", "n": 2}
        headers = {"authorization": "Bearer secret"}
        made = httpx.post(f"{url}/v1/images/generations", json=asked, headers=headers).json()["data"]
        uploaded = httpx.post(f"{url}/v1/files", files={"file": ("a.html", b"<b>")}, headers=headers).json()["id"]
        content = f"{url}/v1/files/{uploaded}/content"
        assert httpx.get(content).status_code == 401
        download = httpx.get(content, headers=headers)
        assert download.content == b"<b>"
        assert download.headers["content-disposition"] == "attachment"
        assert download.headers["content-type"] == "application/octet-stream"
        for one in made:
            found = httpx.get(one["url"])
            assert found.headers["content-type"] == "image/webp"
            assert Image.open(io.BytesIO(found.content)).size == (64, 32)
            other = one["url"].replace(url, "").replace("picture-", "picture-0")
            assert httpx.get(f"{url}{other}").status_code == 401
            digit = one["url"][-9]
            unknown = one["url"].replace(f"{digit}/content", f"{'1' if digit == '0' else '0'}/content")
            assert httpx.get(unknown).status_code == 404


def test_wrong_fields_are_named(pictures: HttpPipeline) -> None:
    for fields, param, code in (
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"size": "100x64"}, "size", "invalid_request"),
        ({"n": 11}, "n", "invalid_value"),
        ({"n": 2, "stream": True}, "n", "invalid_value"),
        ({"response_format": "url", "stream": True}, "response_format", "invalid_value"),
        ({"style": "vivid"}, "style", "unsupported_parameter"),
        ({"output_compression": 50}, "output_compression", "invalid_value"),
        ({"background": "transparent", "output_format": "jpeg"}, "background", "invalid_value"),
        ({"partial_images": 1}, "partial_images", "invalid_value"),
        ({"extra_body": {"progress": True}}, "progress", "invalid_value"),
        ({"extra_body": {"num_inference_steps": 100_000}}, "num_inference_steps", "invalid_value"),
        ({"extra_body": {"stage_params": {"dit": {"max_tokens": 4}}}}, "max_tokens", "invalid_request"),
        ({"extra_body": {"stage_params": {"dit": {"extra_args": {"shift": 3}}}}}, "shift", "invalid_request"),
        ({"extra_body": {"stage_params": {"vae": {"width": 60}}}}, "size", "invalid_request"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            pictures.openai().images.generate(**{"prompt": "a fox", **fields})
        assert (caught.value.param, caught.value.code) == (param, code), fields


def test_a_pipeline_says_what_it_makes(pictures: HttpPipeline, echo: HttpPipeline) -> None:
    with pytest.raises(openai.BadRequestError, match="makes no pictures; it answers in text, audio") as caught:
        echo.openai().images.generate(prompt="a fox")
    assert (caught.value.param, caught.value.code) == ("model", "unknown_modality")
    error = httpx.post(f"{pictures.url}/v1/responses", json={"input": "a", "modalities": ["image"]}).json()["error"]
    assert (error["param"], error["code"]) == ("modalities", "unknown_modality")
    assert "/v1/images/generations" in error["message"]
    status = httpx.get(f"{pictures.url}/v1/status").json()
    assert status["modalities"] == ["image"]
    (width,) = [one for one in status["parameters"]["dit"] if one["name"] == "width"]
    assert (width["least"], width["most"], width["multiple_of"], width["default"]) == (8, 4096, 8, 64)
