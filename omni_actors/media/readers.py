"""Decodes files and resamples sound, in pieces and within limits. Runs in the worker processes.

A header is checked before anything is decoded, and not trusted afterwards: what is decoded is counted, too.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import io
import pkgutil
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import soundfile
from numpy.typing import NDArray

from omni_actors.errors import EngineError, InvalidRequest, MalformedMedia, OmniError
from omni_actors.media.limits import (
    AUDIO_ARRAY,
    AUDIO_FILE,
    DEFAULT_VIDEO_RATE,
    DOCUMENT_FILE,
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
try:
    import pypdf
except ImportError:  # not where only an engine runs, to which documents come as text
    pypdf = None  # type: ignore[assignment]

IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
JPEG_FORMATS: Final = ("JPEG", "MPO")  # as Pillow calls them; the second one has more pictures, as some cameras make it
JPEG_SCALES: Final = (1, 2, 4, 8)  # at which a JPEG can be decoded without decoding all of it
UNKNOWN_FORMAT: Final = 1  # libsndfile's code of the error
BLOCK_BYTES: Final = 1 << 20  # of samples that are decoded at a time
PDF_START: Final = 1024  # bytes within which a PDF says that it is one
PDF_CODECS: Final = ("cp932", "cp950", "gb18030", "gb2312", "gbk", "utf-16-be")  # that pypdf asks Python for
UNKNOWN_FRAMES: Final = 1 << 62  # libsndfile's length of a stream whose header does not say it is larger

Decoded = Samples | Pixels


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
    with _reading(what):
        if kind == AUDIO_FILE:
            with _sound(data, limits, what) as sound:
                return Announced(round(sound.seconds * sound.rate * sound.channels * SAMPLE_BYTES), sound.seconds)
        if kind in IMAGE_MODES:
            with _open_image(data, limits, what) as image:
                return Announced(image.width * image.height * len(IMAGE_MODES[kind]))
        return Announced()  # arrays have been counted, and a video's frames are counted as they are decoded


def decode(kind: str, data: bytes, rate: int, limits: MediaLimits, budget: Budget, what: str) -> Decoded:
    """Decode a medium.

    Sound becomes f32 [samples] at `limits.audio_rate`, a picture u8 [height, width, 3 or 4], a video u8 [frames,
    height, width, 3], and a document u8 [bytes] of UTF-8.

    Args:
        rate: of an array of samples, in Hz.

    Raises:
        MalformedMedia: the file cannot be read, or samples are not finite.
        InvalidRequest: the decoded medium exceeds a limit.
    """
    with _reading(what):
        if kind == AUDIO_ARRAY:
            samples = np.frombuffer(data, dtype=np.float32)
            step = BLOCK_BYTES // SAMPLE_BYTES
            blocks = (samples[at : at + step] for at in range(0, len(samples), step))
            return resampled(blocks, rate, limits.audio_rate, what)
        if kind == AUDIO_FILE:
            with _sound(data, limits, what) as sound:
                return resampled(_mono(sound, limits, what, budget), sound.rate, limits.audio_rate, what)
        if kind == DOCUMENT_FILE:
            return _decode_document(data, limits, what, budget)
        if kind not in IMAGE_MODES:
            return decode_video(data, limits, what, budget)
        mode = IMAGE_MODES[kind]
        with _open_image(data, limits, what) as image:
            take_decoded(budget, image.width * image.height * len(mode), what)
            return np.asarray(ImageOps.exif_transpose(image).convert(mode))


def preload() -> None:
    """Import what the libraries import when it is first needed, as a decoder can open no files then."""
    if Image is not None:
        Image.init()
        features.check("webp")
    for codec in PDF_CODECS:
        codecs.lookup(codec)
    for library in filter(importlib.util.find_spec, ("av", "pypdf")):
        for module in pkgutil.walk_packages(importlib.import_module(library).__path__, f"{library}."):
            if not module.name.endswith(("__main__", "._pycryptodome")):  # the second asks for a library of its own
                importlib.import_module(module.name)


def sniff(data: bytes) -> str:
    """The modality of a file, by its content: "text", "image" or "audio", and "video" if it is none of these."""
    if _is_pdf(data) or _plain(data) is not None:
        return "text"
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


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Around a decoder of a client's bytes. However the decoder fails, the error is `MalformedMedia`."""
    try:
        yield
    except OmniError:
        raise
    except MemoryError as error:
        raise MediaTooLarge(f"{what} takes too much memory to decode.", hint="Send a smaller one.") from error
    except soundfile.LibsndfileError as error:
        raise MalformedMedia(f"{what} cannot be read: {error.error_string}") from error
    except OSError as error:  # of FFmpeg or Pillow; the whole text names the object that holds the file
        raise MalformedMedia(f"{what} cannot be read: {error.strerror or type(error).__name__}.") from error
    except Exception as error:  # decoders raise anything for hostile files
        if type(error).__name__ == "InvalidDataError":  # FFmpeg's, which may be missing
            formats = "WAV, MP3, FLAC, Ogg, M4A, MP4 or WebM"
            raise MalformedMedia(f"{what} is in no format that can be read: send {formats}.") from error
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


class Sound(NamedTuple):
    """A sound that is being read, as its header says: its rate in Hz, and its length, 0 if it does not say that.

    Blocks are f32 [channels, samples].
    """

    rate: int
    channels: int
    seconds: float
    blocks: Iterator[Samples]


@contextlib.contextmanager
def _sound(data: bytes, limits: MediaLimits, what: str) -> Iterator[Sound]:
    """Open a sound by libsndfile (WAV, FLAC, Ogg, MP3) or, if it does not know the format, by FFmpeg."""
    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context(_Stream(io.BytesIO(data)))
        except soundfile.LibsndfileError as error:
            if error.code != UNKNOWN_FORMAT:
                raise
            sound = _sound_of(opened.enter_context(_opened(data)), what)
        else:
            frames = file.frames if file.frames < UNKNOWN_FRAMES else 0
            sound = Sound(file.samplerate, file.channels, frames / file.samplerate, _blocks(file))
        check_rate(sound.rate, limits, what)
        if sound.channels > limits.channels:
            raise InvalidRequest(f"{what} has {sound.channels} channels; at most {limits.channels} are allowed.")
        check_seconds(sound.seconds, limits.audio_seconds, what)
        yield sound


def _sound_of(container: InputContainer, what: str) -> Sound:
    """The first sound of a file that FFmpeg reads."""
    if not container.streams.audio:
        raise MalformedMedia(f"{what} is missing: the file has no sound.")
    stream = container.streams.audio[0]
    stream.codec_context.thread_count = 1
    length = stream.duration * stream.time_base if stream.duration is not None and stream.time_base else 0
    return Sound(stream.rate, stream.channels, max(0.0, float(length)), _planar(container, stream))


def _blocks(file: soundfile.SoundFile) -> Iterator[Samples]:
    """Blocks f32 [channels, samples] of a file that libsndfile reads."""
    count = BLOCK_BYTES // SAMPLE_BYTES // file.channels
    while len(block := file.read(count, dtype="float32", always_2d=True)):
        yield block.T


def _planar(container: InputContainer, stream: Any) -> Iterator[Samples]:
    """Blocks f32 [channels, samples] of a file that FFmpeg reads."""
    import av

    to_floats = av.AudioResampler(format="fltp")  # rate and channels stay
    for frame in container.decode(stream):
        for part in to_floats.resample(frame):
            yield part.to_ndarray().astype(np.float32, copy=False)


def _mono(sound: Sound, limits: MediaLimits, what: str, budget: Budget) -> Iterator[Samples]:
    """Average the channels of a sound, block by block, and count its samples."""
    total = 0
    for block in sound.blocks:
        take_decoded(budget, block.nbytes, what)
        total += block.shape[1]
        check_seconds(total / sound.rate, limits.audio_seconds, what)
        yield block.mean(axis=0, dtype=np.float32)
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


# ---------------------------------------------------------------------------------------------------------------------
# Documents


def _is_pdf(data: bytes) -> bool:
    return b"%PDF-" in data[:PDF_START]


def _plain(data: bytes) -> str | None:
    """The text of a file that is text in UTF-8; `None` for any other."""
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError:
        return None
    return text if "\0" not in text else None


def _decode_document(data: bytes, limits: MediaLimits, what: str, budget: Budget) -> Pixels:
    """UTF-8 of the text of a PDF, or of a file that is text."""
    parts = _pages(data, limits, what) if _is_pdf(data) else [_plain(data)]
    texts: list[str] = []
    for part in parts:
        if part is None:
            raise MalformedMedia(f"{what} is neither a PDF nor text in UTF-8.")
        texts.append(part)
        if sum(map(len, texts)) > limits.document_characters:
            message = f"{what} has more than {limits.document_characters} characters."
            raise MediaTooLarge(message, hint="Send a part of it.")
    text = "\n\n".join(texts).strip()
    if not text:
        raise MalformedMedia(f"{what} has no text in it, as scans have none: send its pages as pictures.")
    encoded = text.encode(errors="replace")
    take_decoded(budget, len(encoded), what)
    return np.frombuffer(encoded, np.uint8)


def _pages(data: bytes, limits: MediaLimits, what: str) -> Iterator[str]:
    """The text of each page of a PDF."""
    if pypdf is None:
        hint = "Its operator must install pypdf (pip install 'omni_actors[http]')."
        raise InvalidRequest("The server cannot read PDF.", hint=hint)
    reader = pypdf.PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise MalformedMedia(f"{what} is an encrypted PDF: remove its password.")
    if len(reader.pages) > limits.document_pages:
        message = f"{what} has {len(reader.pages)} pages; at most {limits.document_pages} are allowed."
        raise MediaTooLarge(message, hint="Send a part of it.")
    for page in reader.pages:
        yield page.extract_text()
