"""What the media of a request may be, and the checks that need no decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from omni_actors.errors import InvalidPayload, InvalidRequest, MalformedMedia, UnknownModality
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.protocol.payloads import MEDIA_MODALITIES, Media, MediaEncoding
from omni_actors.sharing import Budget

AUDIO_RATE: Final = 16_000  # Hz, what the audio encoder was trained with
DEFAULT_VIDEO_RATE: Final = 2.0  # frames per second that the model's processor assumes by default
SAMPLE_BYTES: Final = 4
PIXEL_BYTES: Final = 3

# Kinds of media, as a decoder takes them.
AUDIO_ARRAY: Final = "audio array"
AUDIO_FILE: Final = "audio file"
IMAGE_FILE: Final = "image file"
LAYERED_FILE: Final = "image file with alpha"
VIDEO_FILE: Final = "video file"
DOCUMENT_FILE: Final = "document"  # PDF, or text in UTF-8
UNKNOWN_FILE: Final = "unknown file"
SOUNDS: Final = (AUDIO_ARRAY, AUDIO_FILE)
IMAGE_MODES: Final = {IMAGE_FILE: "RGB", LAYERED_FILE: "RGBA"}  # of what images become


class Item(Struct, frozen=True):
    """A medium to decode.

    Args:
        what: its name in error messages.
        size: bytes of its data.
        rate: of an array of samples, in Hz.
    """

    kind: str
    what: str
    size: int
    rate: int = 0


class MediaTooLarge(InvalidRequest):
    """A medium exceeds a limit."""


@dataclass(frozen=True)
class MediaLimits:
    """Limits for the media of a request; media beyond them are refused, never cut silently.

    Args:
        decoded_bytes: all media of a request after decoding: 4 bytes per sample of each channel at the file's own rate,
            3 bytes per pixel of an image or of a frame that is kept.
        audio_seconds: length of one audio; the engine lowers it to the limit of the model's feature extractor.
        image_pixels: width * height of one image, as sent.
        video_seconds: length of one video file.
        video_frames: frames of one video that are kept.
        video_pixels: width * height of one frame that is kept.
        film_pixels: width * height of one frame of a video file, before it is scaled down.
        film_frames: frames of one video file; most are not kept.
        min_side: smallest width or height of an image or a frame.
        document_pages: of one PDF.
        document_characters: of the text of one document.
        channels: audio channels in a file, which are averaged.
        rate: highest sample rate in Hz.
        audio_rate: what decoded audio is resampled to, in Hz.
    """

    decoded_bytes: int = 256 << 20
    audio_seconds: float = 300.0
    image_pixels: int = 4096 * 4096
    video_seconds: float = 60.0
    video_frames: int = 768
    video_pixels: int = 1920 * 1080
    film_pixels: int = 4096 * 2304
    film_frames: int = 60 * 240
    min_side: int = 4
    document_pages: int = 500
    document_characters: int = 1_000_000
    channels: int = 16
    rate: int = 768_000
    audio_rate: int = AUDIO_RATE


def take_decoded(budget: Budget, size: int, what: str) -> None:
    """Count bytes after decoding. Raises `MediaTooLarge` if the media of the request exceed the budget with them."""
    budget.take(what, size)
    if not budget.fits():
        raise MediaTooLarge(
            f"{what}: the media of the request exceed {budget.limit} bytes when decoded.",
            hint="Send fewer or smaller media: fewer channels, a lower sample rate, fewer pixels.",
        )


def check_counts(modalities: Iterable[str], allowed: Mapping[str, int]) -> None:
    """Raise `InvalidRequest` if there are more media of a modality than a prompt may have.

    Args:
        modalities: of its media.
        allowed: by modality; there is no limit for those that are missing.
    """
    for modality, count in Counter(modalities).items():
        if modality in allowed and count > allowed[modality]:
            raise InvalidRequest(
                f"The prompt has {count} media of the kind {modality}; at most {allowed[modality]} are allowed.",
                hint="Send fewer, or have the operator raise limit_mm_per_prompt.",
            )


def check_media(media: Media, tensor: HostTensor, limits: MediaLimits, budget: Budget, index: int) -> None:
    """Check one medium without decoding a file.

    Args:
        budget: of the request; arrays are counted at once, files when they are decoded.
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
        check_rate(media.sample_rate, limits, what)
        check_seconds(tensor.shape[0] / (media.sample_rate or AUDIO_RATE), limits.audio_seconds, what)
    elif media.modality == "image":
        _check_form(tensor, DType.U8, "[height, width, 3]", (None, None, 3), what)
        check_sides(tensor.shape[1], tensor.shape[0], limits.image_pixels, limits, what)
    else:
        _check_form(tensor, DType.U8, "[frames, height, width, 3]", (None, None, None, 3), what)
        if tensor.shape[0] > limits.video_frames:
            raise MediaTooLarge(f"{what} has {tensor.shape[0]} frames; at most {limits.video_frames} are allowed.")
        check_sides(tensor.shape[2], tensor.shape[1], limits.video_pixels, limits, what)
    take_decoded(budget, memoryview(tensor.data).nbytes, what)


def _check_form(tensor: HostTensor, dtype: DType, form: str, shape: tuple[int | None, ...], what: str) -> None:
    fits = len(tensor.shape) == len(shape) and all(
        wanted in (None, given) for wanted, given in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype is not dtype or not fits:
        raise InvalidPayload(f"{what} needs {dtype} {form}; got {tensor.dtype} {list(tensor.shape)}.")


def check_rate(rate: int | None, limits: MediaLimits, what: str) -> None:
    """Raise `InvalidRequest` unless a sample rate, in Hz, is given and allowed."""
    if rate is None:
        raise InvalidRequest(f"{what}: an array of samples needs a sample_rate.", hint="Give sample_rate in Hz.")
    if not 1000 <= rate <= limits.rate:
        raise InvalidRequest(f"{what}: the sample rate {rate} Hz is outside 1000..{limits.rate}.")


def check_seconds(seconds: float, limit: float, what: str) -> None:
    """Raise `MediaTooLarge` for what lasts longer than `limit` seconds."""
    if seconds > limit:
        raise MediaTooLarge(f"{what} lasts {seconds:.1f} s; at most {limit:g} s are allowed.", hint="Shorten it.")


def check_sides(width: int, height: int, pixels: int, limits: MediaLimits, what: str) -> None:
    """Raise `MediaTooLarge` for more than `pixels`, `InvalidRequest` for a side that is too small."""
    if width * height > pixels:
        raise MediaTooLarge(
            f"{what} has {width} x {height} pixels; at most {pixels} are allowed.", hint="Scale it down."
        )
    if min(width, height) < limits.min_side:
        raise InvalidRequest(f"{what} has {width} x {height} pixels; each side needs at least {limits.min_side}.")


def check_finite(finite: bool, what: str) -> None:
    """Raise `MalformedMedia` for samples that are not `finite`."""
    if not finite:
        raise MalformedMedia(f"{what} holds NaN or infinite samples.", hint="Send finite samples in [-1, 1].")
