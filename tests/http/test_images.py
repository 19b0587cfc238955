"""Pictures and videos: the unchanged `openai` package with echo stages, whose answers depend on all that is asked."""

from __future__ import annotations

import base64
import contextlib
import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import av
import httpx
import numpy
import openai
import psutil
import pytest
from openai.types import Video
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from omni_actors.client import OmniClient
from omni_actors.http_server import videos as routes
from omni_actors.http_server.app import create_app
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.store import Store, VideoJob
from tests.support.servers import HttpPipeline, openai_client, picture, serving
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


pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")

SLOW = {"num_inference_steps": 1000}  # takes seconds


def ended(client: openai.OpenAI, video: Video) -> Video:
    jobs: list[Video] = []

    def is_over() -> bool:
        jobs.append(client.videos.retrieve(video.id))
        return jobs[-1].status in ("completed", "failed")

    until(is_over, 30, what="the video is made")
    return jobs[-1]


def frames_of(client: openai.OpenAI, job: Video) -> numpy.ndarray:
    """What the video of a job shows: [frames, height, width, 3]."""
    job = ended(client, job)
    assert job.status == "completed", job
    with av.open(io.BytesIO(client.videos.download_content(job.id).read())) as file:
        return numpy.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]).astype(int)


def made(client: openai.OpenAI, **fields: Any) -> numpy.ndarray:
    return frames_of(client, client.videos.create(**{"prompt": "a fox", "size": "64x32", **fields}))


def alike(one: numpy.ndarray, other: numpy.ndarray) -> bool:
    """Whether two videos show the same; x264 does not always write the same bytes."""
    return one.shape == other.shape and numpy.abs(one - other).mean() < 2


def test_a_video_and_its_sound_are_made_while_the_client_is_away(videos: HttpPipeline) -> None:
    asked = {"prompt": "a fox", "seconds": "2", "size": "64x32", "seed": "3", **SLOW}
    with httpx.Client(timeout=60) as client:
        answer = client.post(f"{videos.url}/v1/videos", files={name: (None, str(each)) for name, each in asked.items()})
    job = Video.model_construct(**answer.json())  # not validated: OpenAI has other sizes
    assert (job.status, job.progress, job.seconds, job.size, job.model) == ("queued", 0, "2", "64x32", "echo-video")
    client = videos.openai()
    seen: list[int] = []

    def is_half() -> bool:
        seen.append(client.videos.retrieve(job.id).progress)
        return seen[-1] >= 50

    until(is_half, 30, what="half of the steps are done")
    assert seen == sorted(seen)
    with pytest.raises(openai.BadRequestError, match="The video is in_progress"):
        client.videos.download_content(job.id)
    found = ended(client, job)
    assert (found.status, found.progress, found.error) == ("completed", 100, None)
    assert (found.seconds, found.prompt) == ("2", "a fox")
    assert found.completed_at is not None
    assert found.expires_at == pytest.approx(found.completed_at + 3600, abs=2)
    answer = httpx.get(f"{videos.url}/v1/videos/{job.id}/content")
    assert answer.headers["content-type"] == "video/mp4"
    with av.open(io.BytesIO(answer.content)) as file:
        (shown,), (heard,) = file.streams.video, file.streams.audio
        assert (shown.codec_context.name, shown.frames, float(shown.average_rate)) == ("h264", 17, 8)
        assert (shown.width, shown.height) == (64, 32)
        assert (heard.codec_context.name, heard.rate) == ("aac", 24_000)
        assert float(heard.duration * heard.time_base) == pytest.approx(17 / 8, abs=0.1)


def test_every_field_of_a_video_reaches_the_model(videos: HttpPipeline) -> None:
    plain: dict[str, Any] = {"seconds": "1", "extra_body": {"seed": 1}}
    changes = [
        {"seconds": "2"},
        {"extra_body": {"seed": 1, "negative_prompt": "fog"}},
        {"input_reference": ("a.png", picture())},
    ]
    client = videos.openai()
    first, again, *others = (made(client, **{**plain, **changed}) for changed in ({}, {}, *changes))
    assert alike(again, first)
    assert not [changed for changed, other in zip(changes, others, strict=True) if alike(other, first)]


def test_jobs_are_listed_and_deleted(videos: HttpPipeline) -> None:
    client = videos.openai()
    jobs = [ended(client, client.videos.create(prompt=f"fox {number}", size="64x32")) for number in range(3)]
    page = client.videos.list(limit=2)
    assert [one.id for one in page.data] == [jobs[2].id, jobs[1].id]
    assert page.has_more
    assert jobs[0].id in [one.id for one in client.videos.list(after=jobs[1].id)]
    ascending = [one.id for one in client.videos.list(order="asc")]
    assert [one for one in ascending if one in [job.id for job in jobs]] == [job.id for job in jobs]
    assert client.videos.delete(jobs[1].id).deleted
    for call in (client.videos.retrieve, client.videos.download_content, client.videos.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(jobs[1].id)
        assert (caught.value.param, caught.value.code) == ("video_id", "video_not_found")


def test_a_job_that_is_deleted_ends_its_request_before_its_next_step(videos: HttpPipeline) -> None:
    client = videos.openai()
    with OmniClient(videos.endpoint) as looks_on:
        stage = psutil.Process(looks_on.describe().stages[0].pid)
    stage.suspend()  # it is killed if it does not come back for 4 s
    try:
        answer = client.videos.with_raw_response.create(prompt="a fox")
        name = answer.headers["x-request-id"]
        assert client.videos.delete(answer.parse().id).deleted

        def outcome() -> str:
            found: str = httpx.get(f"{videos.url}/v1/requests/{name}/timeline").json()["outcome"]
            return found

        until(lambda: outcome() == "aborted", what="the request is aborted")
        assert stage.status() == psutil.STATUS_STOPPED
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            stage.resume()


def test_what_fails_says_why(videos: HttpPipeline) -> None:
    client = videos.openai()
    job = ended(client, client.videos.create(prompt="a fox", extra_body={**SLOW, "timeout": 1}))
    assert job.status == "failed"
    assert job.error.code == "deadline_exceeded"
    with pytest.raises(openai.BadRequestError, match="The video is failed"):
        client.videos.download_content(job.id)


def test_jobs_are_bounded_in_number_and_bytes(video_pipeline: HttpPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_JOBS", 1)
    with serving(create_app(ServerSettings(endpoint=video_pipeline.endpoint, files_bytes=2000))) as url:
        client = openai_client(url)
        slow = client.videos.create(prompt="a fox", extra_body=SLOW)
        with pytest.raises(openai.RateLimitError, match="1 videos are being made"):
            client.videos.create(prompt="a fox")
        client.videos.delete(slow.id)
        until(lambda: not client.videos.list().data, what="it is gone")
        job = ended(client, client.videos.create(prompt="a fox", size="640x320"))
        assert (job.status, job.error.code) == ("failed", "media_too_large")


def test_the_job_of_a_process_that_died_has_failed(video_pipeline: HttpPipeline, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with serving(create_app(ServerSettings(endpoint=video_pipeline.endpoint, shared_dir=str(tmp_path)))) as url:
        store = Store(str(tmp_path), "videos", VideoJob, 10, 1000, 60.0)
        lost = VideoJob("video_1", 1.0, "m", "a fox", "1", "64x32", process.pid, status="in_progress", progress=40)
        store.add(lost.id, lost, 10)
        job = openai_client(url).videos.retrieve(lost.id)
        assert (job.status, job.error.code) == ("failed", "stage_lost")


def test_wrong_fields_and_queries_are_named(videos: HttpPipeline) -> None:
    for fields, param, code in (
        ({"size": "100x64"}, "size", "invalid_request"),
        ({"seconds": "0"}, "seconds", "invalid_value"),
        ({"seconds": "61"}, "seconds", "invalid_request"),
        ({"model": "sora-2"}, "model", "model_not_found"),
        ({"input_reference": ("a.png", b"no picture")}, "input_reference", "malformed_media"),
        ({"extra_body": {"n": 2}}, "n", "unknown_parameter"),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            videos.openai().videos.create(**{"prompt": "a fox", **fields})
        assert (caught.value.param, caught.value.code) == (param, code)
        assert caught.value.status_code in (400, 404)
    wrong = {"?order=up": "order", "?after=none": "after", "/video_1/content?variant=thumbnail": "variant"}
    for path, param in wrong.items():
        answer = httpx.get(f"{videos.url}/v1/videos{path}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
