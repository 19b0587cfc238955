"""Videos: the unchanged `openai` package with an echo stage, whose videos depend on all that a request says."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import httpx
import numpy
import openai
import psutil
import pytest
from openai.types import Video

from omni_actors.client import OmniClient
from omni_actors.http_server import videos as routes
from omni_actors.http_server.app import create_app
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.store import Store, VideoJob
from tests.support.servers import HttpPipeline, openai_client, picture, serving
from tests.support.waiting import until

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


def test_every_field_reaches_the_model(videos: HttpPipeline) -> None:
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
