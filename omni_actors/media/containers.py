"""Reads containers with PyAV: videos, and sound in formats that libsndfile does not know (M4A, AAC, WebM)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_actors.errors import InvalidRequest, MalformedMedia
from omni_actors.media.limits import (
    DEFAULT_VIDEO_RATE,
    PIXEL_BYTES,
    SAMPLE_BYTES,
    MediaBudget,
    MediaLimits,
    MediaTooLarge,
    check_rate,
    check_seconds,
    check_sides,
)

if TYPE_CHECKING:
    from av.container import InputContainer

# FFmpeg's containers that hold all they show themselves. Others, such as playlists, name further files.
CONTAINERS: Final = "mov,mp4,matroska,webm,avi,flv,mpegts,mpeg,ogg,asf,gif,aac,amr"
SOUND_FORMATS: Final = "WAV, FLAC, MP3, Ogg, M4A, AAC and WebM"
VIDEO_SIDE: Final = 640  # longest side of a kept frame, in pixels

Samples = NDArray[np.float32]
Pixels = NDArray[np.uint8]


def _opened(data: bytes) -> InputContainer:
    try:
        import av
    except ImportError:
        raise InvalidRequest(
            "The server cannot read video, M4A, AAC and WebM.",
            hint="Its operator must install PyAV (pip install 'omni_actors[http]').",
        ) from None
    return av.open(io.BytesIO(data), "r", options={"format_whitelist": CONTAINERS})


def modality_of(data: bytes) -> str:
    """What a container holds: "video", or "audio" if that is all. A cover picture is not a video."""
    with _opened(data) as container:
        films = [stream for stream in container.streams.video if not _is_cover(stream)]
        return "audio" if container.streams.audio and not films else "video"


def _is_cover(stream: Any) -> bool:
    return "attached_pic" in stream.disposition.name if stream.disposition else False


# ---------------------------------------------------------------------------------------------------------------------
# Sound


def _sound_of(container: InputContainer, limits: MediaLimits, what: str) -> Any:
    """The first stream of sound, checked by its header."""
    if not container.streams.audio:
        raise MalformedMedia(f"{what} is missing: the file has no sound.")
    stream = container.streams.audio[0]
    check_rate(stream.rate, limits, what)
    if stream.channels > limits.channels:
        raise InvalidRequest(f"{what} has {stream.channels} channels; at most {limits.channels} are allowed.")
    stream.codec_context.thread_count = 1
    return stream


def measure_sound(data: bytes, limits: MediaLimits, what: str) -> tuple[int, float]:
    """Check a header, and return the bytes and seconds that it announces after decoding, 0 if it does not say."""
    with _opened(data) as container:
        stream = _sound_of(container, limits, what)
        length = stream.duration * stream.time_base if stream.duration is not None and stream.time_base else 0
        seconds = max(0.0, float(length))
        check_seconds(seconds, limits.audio_seconds, what)
        return int(seconds * stream.rate * stream.channels * SAMPLE_BYTES), seconds


def sound_rate(data: bytes, limits: MediaLimits, what: str) -> int:
    """The sample rate in Hz."""
    with _opened(data) as container:
        rate: int = _sound_of(container, limits, what).rate
        return rate


def sound_blocks(data: bytes, limits: MediaLimits, what: str, budget: MediaBudget) -> Iterator[Samples]:
    """Blocks of mono samples f32 at the file's own rate."""
    import av

    total = 0
    with _opened(data) as container:
        stream = _sound_of(container, limits, what)
        planar = av.AudioResampler(format="fltp")  # to floating point; rate and channels stay
        for frame in container.decode(stream):
            for part in planar.resample(frame):
                samples = part.to_ndarray()
                budget.take(samples.nbytes, what)
                total += samples.shape[1]
                check_seconds(total / stream.rate, limits.audio_seconds, what)
                yield samples.mean(axis=0, dtype=np.float32)
    if not total:
        raise MalformedMedia(f"{what} holds no samples.")


# ---------------------------------------------------------------------------------------------------------------------
# Video


def decode_video(data: bytes, limits: MediaLimits, what: str, budget: MediaBudget) -> Pixels:
    """Frames u8 [n, height, width, 3] of a video file, `DEFAULT_VIDEO_RATE` per second."""
    kept: list[Pixels] = []
    with _opened(data) as container:
        if not container.streams.video:
            raise MalformedMedia(f"{what} has no pictures.")
        stream = container.streams.video[0]
        context = stream.codec_context
        check_sides(context.width, context.height, limits.film_pixels, limits, what)
        context.options = {"max_pixels": str(limits.film_pixels)}  # later frames may be larger than the header says
        context.thread_count = 1
        for count, frame in enumerate(container.decode(stream)):
            seconds = float(frame.time or 0.0)
            if count >= limits.film_frames:
                raise MediaTooLarge(f"{what} has more than {limits.film_frames} frames.")
            check_seconds(seconds, limits.video_seconds, what)
            if seconds * DEFAULT_VIDEO_RATE < len(kept):
                continue
            check_sides(frame.width, frame.height, limits.film_pixels, limits, what)
            scale = min(1.0, VIDEO_SIDE / max(frame.width, frame.height))
            size = (max(2, round(frame.width * scale)), max(2, round(frame.height * scale)))
            budget.take(size[0] * size[1] * PIXEL_BYTES, what)
            small = frame.reformat(width=size[0], height=size[1], format="rgb24")
            picture = np.ascontiguousarray(small.to_ndarray(), dtype=np.uint8)
            if kept and picture.shape != kept[0].shape:
                raise MalformedMedia("The frames of the video differ in size.")
            kept.append(picture)
    if not kept:
        raise MalformedMedia(f"{what} has no frames.")
    if len(kept) % 2:
        budget.take(kept[-1].nbytes, what)
        kept.append(kept[-1])  # the model takes frames in pairs
    return np.stack(kept)
