"""The routes of /v1/videos: jobs that make videos of a text, or of a text and a picture, and keep them as MP4 files.

A job is a request of the process that took it. All processes of the server see it in the store, where each step that it
reports is written; what it has made is kept there for as long as uploaded files are.
"""

from __future__ import annotations

import asyncio
import io
import os
import time
import uuid
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal

import msgspec
import numpy
import psutil
from msgspec import Meta
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from omni_actors.client import Audio, Progress, RequestStream, Video
from omni_actors.config import check_parameters
from omni_actors.errors import ErrorCode, OmniError
from omni_actors.http_server.answer import request_options
from omni_actors.http_server.bodies import Form, FormBody
from omni_actors.http_server.encoders import AacEncoder
from omni_actors.http_server.errors import HttpError, bad_field, fields_at_fault, internal_error, too_large
from omni_actors.http_server.images import FIELD_OF, DrawingFields, drawing, parameters_of
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.http_server.store import VideoJob
from omni_actors.logs import get_logger

logger = get_logger(__name__)

MODALITY = "video"
REFERENCE = "input_reference"
MAX_JOBS = 16  # that a process has under way
SHOWN = ("id", "completed_at", "expires_at", "model", "prompt", "seconds", "size", "progress")
FIELDS = fields_at_fault("prompt", REFERENCE, **FIELD_OF)


class VideoRequest(DrawingFields, frozen=True, kw_only=True):
    """Body of POST /v1/videos: first OpenAI's fields, then those of diffusion models."""

    seconds: Annotated[float, Meta(gt=0, le=3600)] | None = None


BODY = FormBody(VideoRequest, {}, {REFERENCE: 1}, None)


class ListQuery(msgspec.Struct):
    """The query of GET /v1/videos."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=0, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class ContentQuery(msgspec.Struct):
    """The query of GET /v1/videos/{video_id}/content."""

    variant: Literal["video"] = "video"


async def create(request: Request, state: ServerState, form: Form[VideoRequest]) -> Response:
    """Begin a video. It is made whether or not the client stays."""
    fields = form.fields
    description, prompt, params = await drawing(fields, form.files, MODALITY, state)
    for stage, own in params.items():
        try:
            check_parameters(stage, description.parameters[stage], own)
        except OmniError as error:
            raise HttpError.of(error, FIELDS) from error
    defaults = {one.name: one.default for those in description.parameters.values() for one in those}
    given = {**defaults, **parameters_of(fields)}
    sides = [given.get(name) for name in ("width", "height")]
    job = VideoJob(
        id=f"video_{uuid.uuid4().hex}",
        created=time.time(),
        model=state.model_name(fields.model, description),
        prompt=fields.prompt,
        seconds=f"{given['seconds']:g}" if given.get("seconds") is not None else "",
        size="" if None in sides else "x".join(map(str, sides)),
        process=os.getpid(),
    )
    await state.videos.keep(job.id, job, len(job.prompt))
    try:
        if len(state.video_jobs) >= MAX_JOBS:  # from here on nothing is waited for
            message = f"{MAX_JOBS} videos are being made: try again when one of them is done, or has been deleted."
            raise HttpError(429, message, code=ErrorCode.OVERLOADED.value)
        stream = await state.client.submit(
            prompt,
            modalities=[one for one in ("audio", MODALITY) if one in description.modalities],
            params=params,
            seed=fields.seed,
            request_id=request.state.request_id,
            **request_options(request, state, fields),
        )
    except (HttpError, OmniError) as error:
        await asyncio.to_thread(state.videos.remove, job.id)
        raise HttpError.of(error, FIELDS) from error
    making = asyncio.create_task(_make(job, stream, state), name=job.id)
    state.video_jobs[job.id] = making
    making.add_done_callback(lambda _: state.video_jobs.pop(job.id))
    return json_response(_shown(job))


async def retrieve(request: Request, state: ServerState, video_id: str) -> Response:
    """A video's job: its status and progress."""
    return json_response(_shown(await state.videos.get(video_id)))


async def listed(request: Request, state: ServerState, query: ListQuery) -> Response:
    """The jobs, the newest first unless `order` says otherwise."""
    jobs = sorted(await asyncio.to_thread(state.videos.values), key=lambda job: job.created)
    jobs = jobs[::-1] if query.order == "desc" else jobs
    if query.after is not None:
        place = next((index for index, job in enumerate(jobs) if job.id == query.after), None)
        if place is None:
            raise bad_field("after", f"There is no video {query.after[:100]!r}.")
        jobs = jobs[place + 1 :]
    shown = [_shown(job) for job in jobs[: query.limit]]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": shown, **ends, "has_more": len(jobs) > len(shown)})


async def content(request: Request, state: ServerState, query: ContentQuery, video_id: str) -> Response:
    """The video as an MP4 file."""
    job = await state.videos.get(video_id)
    if _shown(job)["status"] != "completed":
        raise HttpError(400, f"The video is {_shown(job)['status']}.", param="video_id", code="video_not_completed")
    headers = {"content-length": str(job.bytes), "x-content-type-options": "nosniff"}
    return StreamingResponse(state.videos.pieces(job.id, job.bytes), 200, headers, "video/mp4")


async def delete(request: Request, state: ServerState, video_id: str) -> Response:
    """Delete a video. A job that is under way ends, at its next step if another process has it."""
    deleted = await state.videos.delete(video_id)
    if (making := state.video_jobs.get(deleted["id"])) is not None:
        making.cancel()
    return json_response({**deleted, "object": "video.deleted"})


def _shown(job: VideoJob) -> dict[str, Any]:
    """A job as OpenAI's object. One whose process has died has failed."""
    status, error = job.status, job.error
    if status in ("queued", "in_progress") and not psutil.pid_exists(job.process):
        message = "The process of the server that made this video has died: ask for it once more."
        status, error = "failed", {"code": ErrorCode.STAGE_LOST.value, "message": message}
    own = {"object": "video", "created_at": int(job.created), "status": status, "error": error}
    return {**{name: getattr(job, name) for name in SHOWN}, **own, "remixed_from_video_id": None}


# ---------------------------------------------------------------------------------------------------------------------
# Jobs


async def _make(job: VideoJob, stream: RequestStream, state: ServerState) -> None:
    """Follow a request to its end, and keep its video, or why there is none."""

    async def note(data: bytes = b"", **changed: Any) -> None:
        nonlocal job
        job = msgspec.structs.replace(job, **changed)
        if not await asyncio.to_thread(state.videos.add, job.id, job, len(job.prompt) + len(data), data, there=True):
            raise asyncio.CancelledError(f"{job.id} has been deleted, or cannot be written")

    sounds: list[Audio] = []
    file: Mp4 | None = None
    try:
        async for item in stream:
            if isinstance(item, Progress):
                progress = min(99, 100 * item.step // item.steps)
                if job.status == "queued" or progress > job.progress:
                    await note(status="in_progress", progress=progress)
            elif isinstance(item, Audio):
                sounds.append(item)
            elif isinstance(item, Video):
                if file is None:
                    file = await asyncio.to_thread(Mp4, item, sounds)
                await asyncio.to_thread(file.feed, item.frames)
        if file is None:
            raise HttpError(500, "The model ended without a video.", code=ErrorCode.ENGINE_ERROR.value)
        data = await asyncio.to_thread(file.finish)
        if len(data) > (most := state.settings.files_bytes):
            raise too_large(f"All videos together are limited to {most} bytes; this one has {len(data)}.")
        now = time.time()
        times = {"completed_at": int(now), "expires_at": int(now + state.settings.file_seconds)}
        about = {"size": file.size, "seconds": job.seconds or f"{file.seconds:g}", "bytes": len(data)}
        await note(data, status="completed", progress=100, **times, **about)
    except (HttpError, OmniError) as error:
        await note(status="failed", error=_error(HttpError.of(error)))
    except Exception:
        logger.exception("%s failed", job.id)
        await note(status="failed", error=_error(internal_error()))
    finally:
        await stream.abort()


def _error(error: HttpError) -> dict[str, str]:
    return {"code": error.code or "", "message": error.message}


class Mp4:
    """Writes a video and its sound as H.264 and AAC, on threads.

    Args:
        first: its first frames, which are fed like the others.
        sounds: all of its sound.

    Raises:
        HttpError: AAC does not have the sound's rate.
    """

    def __init__(self, first: Video, sounds: Sequence[Audio]) -> None:
        import av

        self._frame, self._rate, self._frames = av.VideoFrame, first.frames_per_second, 0
        self._sink = io.BytesIO()
        self._file = av.open(self._sink, "w", format="mp4")
        rate = Fraction(self._rate).limit_denominator(1001)
        self._stream = self._file.add_stream("libx264", rate=rate, options={"crf": "18"})
        _, self._stream.height, self._stream.width, _ = first.frames.shape
        is_even = self._stream.height % 2 == self._stream.width % 2 == 0
        self._stream.pix_fmt = "yuv420p" if is_even else "yuv444p"  # which fewer players show
        self.size = f"{self._stream.width}x{self._stream.height}"
        if sounds:
            encoder = AacEncoder(sounds[0].sample_rate, self._file)
            encoder.feed(numpy.concatenate([one.samples for one in sounds]))
            encoder.end()

    @property
    def seconds(self) -> float:
        """Length of the frames so far."""
        return round(self._frames / self._rate, 3)

    def feed(self, frames: NDArray[numpy.uint8]) -> None:
        """Write the next frames."""
        self._frames += len(frames)
        for frame in frames:
            self._file.mux(self._stream.encode(self._frame.from_ndarray(frame, "rgb24")))

    def finish(self) -> bytes:
        """The whole file."""
        self._file.mux(self._stream.encode())
        self._file.close()
        return self._sink.getvalue()
