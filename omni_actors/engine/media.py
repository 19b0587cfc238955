"""Checks the audio, images and video of a request and converts them to the input of the model's processor.

`check_media` is cheap and runs when a request starts; `decode_media` reads files and resamples.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import soundfile
import soxr
from PIL import Image, ImageOps, UnidentifiedImageError

from omni_actors.errors import InvalidPayload, InvalidRequest, MalformedMedia, OmniError, UnknownModality
from omni_actors.protocol.payloads import MEDIA_MODALITIES, Media, MediaEncoding
from omni_actors.protocol.tensors import DType, HostTensor

AUDIO_RATE: Final = 16_000  # Hz, what the audio encoder was trained with
DEFAULT_VIDEO_RATE: Final = 2.0  # frames per second that the model's processor assumes by default
IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP")
_NUMPY_DTYPES: Final = {DType.F32: np.float32, DType.U8: np.uint8}


@dataclass(frozen=True)
class MediaLimits:
    """Limits for the media of a request; media beyond them are refused, never cut silently.

    Args:
        audio_seconds: length of one audio; the engine lowers it to the limit of the model's feature extractor.
        image_pixels: width * height of one image, as sent.
        video_frames: frames of one video.
        video_pixels: width * height of one frame.
        min_side: smallest width or height of an image or a frame.
        channels: audio channels in a file, which are averaged.
        rate: highest sample rate in Hz.
    """

    audio_seconds: float = 300.0
    image_pixels: int = 4096 * 4096
    video_frames: int = 768
    video_pixels: int = 1920 * 1080
    min_side: int = 4
    channels: int = 16
    rate: int = 768_000


@dataclass(frozen=True)
class DecodedMedia:
    """Input of the model: audio f32 [samples] at 16 kHz, a PIL RGB image, or video u8 [frames, height, width, 3]."""

    modality: str
    data: Any
    frames_per_second: float = DEFAULT_VIDEO_RATE


def check_media(media: Media, tensor: HostTensor, limits: MediaLimits, index: int) -> None:
    """Check one medium without decoding a file.

    Args:
        index: its position in the request, for error messages.

    Raises:
        UnknownModality: it is not audio, image or video.
        InvalidPayload: the tensor's dtype, shape or length is wrong.
        InvalidRequest: it exceeds a limit, or a rate is missing or not allowed.
        MalformedMedia: it is empty.
    """
    what = f"media {index} ({media.modality})"
    if media.modality not in MEDIA_MODALITIES:
        known = ", ".join(MEDIA_MODALITIES)
        raise UnknownModality(f"media {index} has the modality {media.modality!r}; it must be one of {known}.")
    tensor.validate(what)
    if 0 in tensor.shape:
        raise MalformedMedia(f"{what} is empty.")
    if media.encoding is MediaEncoding.FILE:
        if media.modality == "video":
            raise InvalidRequest(f"{what}: video files are not decoded.", hint="Send the frames as an array.")
        if media.sample_rate is not None or media.frames_per_second is not None:
            raise InvalidRequest(f"{what}: a file has its own rate; leave out sample_rate and frames_per_second.")
        _check_form(tensor, DType.U8, "[bytes]", (None,), what)
        return
    if media.modality == "audio":
        _check_form(tensor, DType.F32, "[samples]", (None,), what)
        _check_rate(media.sample_rate, limits, what)
        _check_seconds(tensor.shape[0] / (media.sample_rate or AUDIO_RATE), limits, what)
    elif media.modality == "image":
        _check_form(tensor, DType.U8, "[height, width, 3]", (None, None, 3), what)
        _check_sides(tensor.shape[1], tensor.shape[0], limits.image_pixels, limits, what)
    else:
        _check_form(tensor, DType.U8, "[frames, height, width, 3]", (None, None, None, 3), what)
        if tensor.shape[0] > limits.video_frames:
            raise InvalidRequest(f"{what} has {tensor.shape[0]} frames; at most {limits.video_frames} are allowed.")
        _check_sides(tensor.shape[2], tensor.shape[1], limits.video_pixels, limits, what)


def decode_media(media: Media, tensor: HostTensor, limits: MediaLimits, index: int) -> DecodedMedia:
    """Convert a checked medium to the processor's input, which shares no memory with `tensor`.

    Raises:
        MalformedMedia: the file cannot be read, or samples are not finite.
        InvalidRequest: the decoded medium exceeds a limit.
    """
    what = f"media {index} ({media.modality})"
    if media.encoding is MediaEncoding.FILE:
        data = bytes(tensor.data)
        if media.modality == "audio":
            return DecodedMedia("audio", _read(_read_audio, data, limits, what))
        return DecodedMedia("image", _read(_read_image, data, limits, what))
    # Copied, because the bytes may be a socket frame that is soon reused.
    array = np.frombuffer(tensor.data, dtype=_NUMPY_DTYPES[tensor.dtype]).reshape(tensor.shape).copy()
    if media.modality == "audio":
        return DecodedMedia("audio", _to_model_rate(array, media.sample_rate or AUDIO_RATE, what))
    if media.modality == "image":
        # An image, not an array: with an array the processor would guess which axis holds the channels.
        return DecodedMedia("image", Image.fromarray(array, "RGB"))
    return DecodedMedia("video", array, media.frames_per_second or DEFAULT_VIDEO_RATE)


def _check_form(tensor: HostTensor, dtype: DType, form: str, shape: tuple[int | None, ...], what: str) -> None:
    fits = len(tensor.shape) == len(shape) and all(
        wanted in (None, given) for wanted, given in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype is not dtype or not fits:
        raise InvalidPayload(f"{what} needs {dtype} {form}; got {tensor.dtype} {list(tensor.shape)}.")


def _check_rate(rate: int | None, limits: MediaLimits, what: str) -> None:
    if rate is None:
        raise InvalidRequest(f"{what}: an array of samples needs a sample_rate.", hint="Give sample_rate in Hz.")
    if not 1000 <= rate <= limits.rate:
        raise InvalidRequest(f"{what}: the sample rate {rate} Hz is outside 1000..{limits.rate}.")


def _check_seconds(seconds: float, limits: MediaLimits, what: str) -> None:
    if seconds > limits.audio_seconds:
        raise InvalidRequest(
            f"{what} lasts {seconds:.1f} s; at most {limits.audio_seconds:g} s are allowed.", hint="Shorten the audio."
        )


def _check_sides(width: int, height: int, pixels: int, limits: MediaLimits, what: str) -> None:
    if width * height > pixels:
        raise InvalidRequest(
            f"{what} has {width} x {height} pixels; at most {pixels} are allowed.", hint="Scale it down."
        )
    if min(width, height) < limits.min_side:
        raise InvalidRequest(f"{what} has {width} x {height} pixels; each side needs at least {limits.min_side}.")


def _read(reader: Callable[[bytes, MediaLimits, str], Any], data: bytes, limits: MediaLimits, what: str) -> Any:
    """Run a decoder on a client's bytes. However the decoder fails, the error is `MalformedMedia`."""
    try:
        return reader(data, limits, what)
    except OmniError:
        raise
    except Exception as error:
        raise MalformedMedia(f"{what} cannot be read: {type(error).__name__}: {error}") from error


def _read_audio(data: bytes, limits: MediaLimits, what: str) -> np.ndarray:
    """Mono f32 [samples] at 16 kHz from a file that libsndfile knows (WAV, FLAC, OGG, MP3)."""
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        _check_rate(file.samplerate, limits, what)
        if file.channels > limits.channels:
            raise InvalidRequest(f"{what} has {file.channels} channels; at most {limits.channels} are allowed.")
        # The header's length cannot be trusted: read at most the allowed samples, plus one that shows there are more.
        allowed = int(limits.audio_seconds * file.samplerate)
        samples = file.read(allowed + 1, dtype="float32", always_2d=True)
        _check_seconds(max(len(samples), 0) / file.samplerate, limits, what)
        rate = file.samplerate
    if not len(samples):
        raise MalformedMedia(f"{what} holds no samples.")
    return _to_model_rate(samples.mean(axis=1), rate, what)


def _to_model_rate(samples: np.ndarray, rate: int, what: str) -> np.ndarray:
    if not np.isfinite(samples).all():
        raise MalformedMedia(f"{what} holds NaN or infinite samples.", hint="Send finite samples in [-1, 1].")
    if rate == AUDIO_RATE:
        return np.ascontiguousarray(samples, dtype=np.float32)
    resampled = np.ascontiguousarray(soxr.resample(samples, rate, AUDIO_RATE), dtype=np.float32)
    if not len(resampled):
        raise MalformedMedia(f"{what} is too short to be resampled.")
    return resampled


def _read_image(data: bytes, limits: MediaLimits, what: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except UnidentifiedImageError as error:
        raise MalformedMedia(f"{what} is not a {', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]} file.") from error
    except Image.DecompressionBombError as error:
        raise InvalidRequest(f"{what}: {error}", hint="Scale it down.") from error
    with image:
        # Checked before decoding: a small file may unpack to gigabytes.
        _check_sides(image.width, image.height, limits.image_pixels, limits, what)
        return ImageOps.exif_transpose(image).convert("RGB")
