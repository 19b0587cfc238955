"""Decodes files and resamples sound, in pieces and within limits. Runs in the worker processes.

A header is checked before anything is decoded, and not trusted afterwards: what is decoded is counted, too.
"""

from __future__ import annotations

import importlib.util
import io
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import soundfile
from numpy.typing import NDArray

from omni_actors.errors import EngineError, InvalidRequest, MalformedMedia, OmniError
from omni_actors.media.limits import (
    AUDIO_ARRAY,
    AUDIO_FILE,
    DEFAULT_VIDEO_RATE,
    IMAGE_MODES,
    PIXEL_BYTES,
    SAMPLE_BYTES,
    MediaLimits,
    MediaTooLarge,
    check_finite,
    check_rate,
    check_seconds,
    check_sides,
    take_decoded,
)
from omni_actors.sharing import Budget

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


def sound_blocks(data: bytes, limits: MediaLimits, what: str, budget: Budget) -> Iterator[Samples]:
    """Blocks of mono samples f32 at the file's own rate."""
    import av

    total = 0
    with _opened(data) as container:
        stream = _sound_of(container, limits, what)
        planar = av.AudioResampler(format="fltp")  # to floating point; rate and channels stay
        for frame in container.decode(stream):
            for part in planar.resample(frame):
                samples = part.to_ndarray()
                take_decoded(budget, samples.nbytes, what)
                total += samples.shape[1]
                check_seconds(total / stream.rate, limits.audio_seconds, what)
                yield samples.mean(axis=0, dtype=np.float32)
    if not total:
        raise MalformedMedia(f"{what} holds no samples.")


# ---------------------------------------------------------------------------------------------------------------------
# Video


def decode_video(data: bytes, limits: MediaLimits, what: str, budget: Budget) -> Pixels:
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
            take_decoded(budget, size[0] * size[1] * PIXEL_BYTES, what)
            small = frame.reformat(width=size[0], height=size[1], format="rgb24")
            picture = np.ascontiguousarray(small.to_ndarray(), dtype=np.uint8)
            if kept and picture.shape != kept[0].shape:
                raise MalformedMedia("The frames of the video differ in size.")
            kept.append(picture)
    if not kept:
        raise MalformedMedia(f"{what} has no frames.")
    if len(kept) % 2:
        take_decoded(budget, kept[-1].nbytes, what)
        kept.append(kept[-1])  # the model takes frames in pairs
    return np.stack(kept)


try:
    import soxr
except ImportError:  # not where only the HTTP server runs, which resamples nothing
    soxr = None
try:
    from PIL import Image, ImageOps, UnidentifiedImageError, features
except ImportError:  # not where nothing but sound is sent
    Image = None  # type: ignore[assignment]

IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
JPEG_FORMATS: Final = ("JPEG", "MPO")  # as Pillow calls them; the second one has more pictures, as some cameras make it
JPEG_SCALES: Final = (1, 2, 4, 8)  # at which a JPEG can be decoded without decoding all of it
UNKNOWN_FORMAT: Final = 1  # libsndfile's code of the error
BLOCK_BYTES: Final = 1 << 20  # of samples that are decoded at a time
UNKNOWN_FRAMES: Final = 1 << 62  # libsndfile's length of a stream whose header does not say it is larger

Decoded = Samples | Pixels
T = TypeVar("T")


class Announced(NamedTuple):
    """What a header says: the bytes after decoding, and a sound's length, 0 if it does not say it."""

    size: int = 0
    seconds: float = 0.0


def measure(kind: str, data: bytes, limits: MediaLimits, what: str) -> Announced:
    """Check what a medium's header says, and return what it announces.

    Raises:
        MalformedMedia: the file cannot be read.
        InvalidRequest: it exceeds a limit.
    """
    if kind == AUDIO_FILE:
        return _read(lambda: _measure_audio(data, limits, what), what)
    if kind in IMAGE_MODES:
        return _read(lambda: _measure_image(data, IMAGE_MODES[kind], limits, what), what)
    return Announced()  # arrays have been counted, and a video's frames are counted as they are decoded


def decode(kind: str, data: bytes, rate: int, limits: MediaLimits, budget: Budget, what: str) -> Decoded:
    """Decode a medium.

    Sound becomes f32 [samples] at `limits.audio_rate`, a picture u8 [height, width, 3 or 4] and a video u8 [frames,
    height, width, 3].

    Args:
        rate: of an array of samples, in Hz.

    Raises:
        MalformedMedia: the file cannot be read, or samples are not finite.
        InvalidRequest: the decoded medium exceeds a limit.
    """
    if kind == AUDIO_ARRAY:
        samples = np.frombuffer(data, dtype=np.float32)
        step = BLOCK_BYTES // SAMPLE_BYTES
        blocks = (samples[at : at + step] for at in range(0, len(samples), step))
        return _read(lambda: resampled(blocks, rate, limits.audio_rate, what), what)
    if kind == AUDIO_FILE:
        return _read(lambda: _decode_audio(data, limits, what, budget), what)
    if kind in IMAGE_MODES:
        return _read(lambda: _decode_image(data, IMAGE_MODES[kind], limits, what, budget), what)
    return _read(lambda: decode_video(data, limits, what, budget), what)


def preload() -> None:
    """Import what the libraries import when it is first needed, as a decoder can open no files then."""
    if Image is not None:
        Image.init()
        features.check("webp")
    if importlib.util.find_spec("av") is not None:
        for module in pkgutil.walk_packages(importlib.import_module("av").__path__, "av."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def sniff(data: bytes) -> str:
    """The modality of a file, by its content: "image" or "audio", and "video" if it is neither."""
    if Image is not None:
        try:
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS):
                return "image"
        except Image.DecompressionBombError:
            return "image"
        except (OSError, ValueError, SyntaxError):
            pass  # not an image: the next reader decides
    try:
        with soundfile.SoundFile(io.BytesIO(data)):
            return "audio"
    except (soundfile.LibsndfileError, ValueError, RuntimeError):
        pass  # not one of libsndfile's formats
    try:
        return modality_of(data)
    except (OSError, ValueError, OmniError):
        return "video"  # its reader reports what is wrong


def _read(reader: Callable[[], T], what: str) -> T:
    """Run a decoder on a client's bytes. However the decoder fails, the error is `MalformedMedia`."""
    try:
        return reader()
    except OmniError:
        raise
    except MemoryError as error:
        raise MediaTooLarge(f"{what} takes too much memory to decode.", hint="Send a smaller one.") from error
    except soundfile.LibsndfileError as error:
        raise MalformedMedia(f"{what} cannot be read: {error.error_string}") from error
    except OSError as error:  # of FFmpeg or Pillow; the whole text names the object that holds the file
        raise MalformedMedia(f"{what} cannot be read: {error.strerror or type(error).__name__}.") from error
    except Exception as error:  # decoders raise anything for hostile files
        raise MalformedMedia(f"{what} cannot be read: {type(error).__name__}: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Audio


class _Stream(soundfile.SoundFile):  # type: ignore[misc]
    """A file that is read from its beginning to its end.

    `SoundFile` seeks to its own position after every read. In compressed files that may change the samples that follow,
    and it fails where the header does not say how long the file is.
    """

    def seekable(self) -> bool:
        return False


def _measure_audio(data: bytes, limits: MediaLimits, what: str) -> Announced:
    if not _is_known(data):
        return Announced(*measure_sound(data, limits, what))
    with _Stream(io.BytesIO(data)) as file:
        return _check_audio_header(file, limits, what)


def _is_known(data: bytes) -> bool:
    """Whether libsndfile knows the format of a file, be the file in order or not."""
    try:
        _Stream(io.BytesIO(data)).close()
    except soundfile.LibsndfileError as error:
        return bool(error.code != UNKNOWN_FORMAT)
    return True


def _check_audio_header(file: soundfile.SoundFile, limits: MediaLimits, what: str) -> Announced:
    check_rate(file.samplerate, limits, what)
    if file.channels > limits.channels:
        raise InvalidRequest(f"{what} has {file.channels} channels; at most {limits.channels} are allowed.")
    frames = file.frames if file.frames < UNKNOWN_FRAMES else 0
    check_seconds(frames / file.samplerate, limits.audio_seconds, what)
    return Announced(int(frames * file.channels * SAMPLE_BYTES), frames / file.samplerate)


def _decode_audio(data: bytes, limits: MediaLimits, what: str, budget: Budget) -> Samples:
    """Mono f32 [samples] at `limits.audio_rate` from a file that libsndfile (WAV, FLAC, Ogg, MP3) or FFmpeg knows."""
    if not _is_known(data):
        rate = sound_rate(data, limits, what)
        return resampled(sound_blocks(data, limits, what, budget), rate, limits.audio_rate, what)
    with _Stream(io.BytesIO(data)) as file:
        _check_audio_header(file, limits, what)
        return resampled(_mono_blocks(file, limits, what, budget), file.samplerate, limits.audio_rate, what)


def _mono_blocks(file: soundfile.SoundFile, limits: MediaLimits, what: str, budget: Budget) -> Iterator[Samples]:
    block = BLOCK_BYTES // SAMPLE_BYTES // file.channels
    total = 0
    while len(samples := file.read(block, dtype="float32", always_2d=True)):
        total += len(samples)
        take_decoded(budget, samples.nbytes, what)
        check_seconds(total / file.samplerate, limits.audio_seconds, what)
        yield samples.mean(axis=1)
    if not total:
        raise MalformedMedia(f"{what} holds no samples.")


def resampled(blocks: Iterable[Samples], rate: int, wanted: int, what: str) -> Samples:
    """Join blocks of mono samples at `rate` Hz, resampled to `wanted` Hz one by one.

    The result has the same bits as if all of them were resampled at once.

    Raises:
        MalformedMedia: a sample is not finite, or there are too few.
    """
    resampler = soxr.ResampleStream(rate, wanted, 1, dtype="float32") if rate != wanted else None
    pieces: list[Samples] = []
    for block in blocks:
        check_finite(bool(np.isfinite(block).all()), what)
        pieces.append(resampler.resample_chunk(block) if resampler is not None else block)
    if resampler is not None:
        pieces.append(resampler.resample_chunk(np.empty(0, np.float32), last=True))
    joined = np.concatenate(pieces)
    if not len(joined):
        raise MalformedMedia(f"{what} is too short to be resampled.")
    return joined


# ---------------------------------------------------------------------------------------------------------------------
# Images


def _open_image(data: bytes, limits: MediaLimits, what: str) -> Image.Image:
    if Image is None:
        raise EngineError("Images cannot be read here.", hint="Install Pillow.")
    try:
        image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except UnidentifiedImageError as error:
        raise MalformedMedia(f"{what} is not a {', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]} file.") from error
    except Image.DecompressionBombError as error:
        raise MediaTooLarge(f"{what}: {error}", hint="Scale it down.") from error
    if image.format in JPEG_FORMATS:
        _scale_down(image, limits.image_pixels)
    # Checked before decoding: a small file may unpack to gigabytes.
    check_sides(image.width, image.height, limits.image_pixels, limits, what)
    return image


def _scale_down(image: Image.Image, pixels: int) -> None:
    """Have a JPEG of more than `pixels` decoded at the largest scale with fewer, which takes less memory and time."""
    width, height = image.size
    for scale in JPEG_SCALES:
        if (width // scale) * (height // scale) <= pixels:
            break
    if scale > 1:
        image.draft(None, (width // scale, height // scale))


def _measure_image(data: bytes, mode: str, limits: MediaLimits, what: str) -> Announced:
    with _open_image(data, limits, what) as image:
        return Announced(image.width * image.height * len(mode))


def _decode_image(data: bytes, mode: str, limits: MediaLimits, what: str, budget: Budget) -> Pixels:
    with _open_image(data, limits, what) as image:
        take_decoded(budget, image.width * image.height * len(mode), what)
        return np.asarray(ImageOps.exif_transpose(image).convert(mode))
