"""Sound in the formats of files and of streams, as fast as it was made or at another speed."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import struct
from collections.abc import AsyncIterable, AsyncIterator
from fractions import Fraction
from typing import Any, Protocol

import msgspec
import numpy
import soundfile
from numpy.typing import NDArray

from omni_actors.client import Audio, StreamItem
from omni_actors.http_server.bodies import base64_string
from omni_actors.http_server.errors import bad_field

Samples = NDArray[numpy.float32]

MEDIA_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}
SOUNDFILE_FORMATS = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III"), "opus": ("OGG", "OPUS")}
AAC_RATES = (7350, 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)
AAC_BITS = 96_000  # per second
OPUS_RATES = (8000, 12000, 16000, 24000, 48000)
UNKNOWN_LENGTH = 0xFFFFFFFF  # players read it as "until the stream ends"


def pcm16(samples: Samples) -> bytes:
    """Little-endian 16-bit samples of f32 [samples], clipped to [-1, 1]."""
    scaled = numpy.clip(samples, -1.0, 1.0)
    scaled *= 32767.0
    return numpy.rint(scaled, out=scaled).astype("<i2").tobytes()


def samples_of(pcm: bytes) -> Samples:
    """The samples f32 [n] of little-endian 16-bit PCM, from -1 to 1."""
    return numpy.frombuffer(pcm, "<i2").astype(numpy.float32) / numpy.float32(32768)


def wav_header(rate: int, n_bytes: int | None) -> bytes:
    """The 44 bytes before mono PCM16 samples at `rate` Hz; `n_bytes` is `None` if their length is unknown."""
    data = UNKNOWN_LENGTH if n_bytes is None else n_bytes
    riff = UNKNOWN_LENGTH if n_bytes is None else n_bytes + 36
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16, b"data", data
    )


class _Sink(io.BytesIO):
    """Collects what an encoder wrote since the last `take`.

    At the end encoders go back to complete their header. In a stream the header has been sent by then; all formats here
    are readable without it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._taken = 0

    def take(self) -> bytes:
        with self.getbuffer() as view:
            fresh = bytes(view[self._taken :])
        self._taken += len(fresh)
        return fresh


class Encoder(Protocol):
    """Makes a stream of sound in one format."""

    def feed(self, samples: Samples) -> bytes:
        """Bytes that are complete after samples f32 [n]; may be none."""

    def finish(self) -> bytes:
        """The last bytes."""


class PcmEncoder:
    """PCM of 16 bits, as it is or as a WAV file of unknown length."""

    def __init__(self, name: str, rate: int) -> None:
        self._head = wav_header(rate, None) if name == "wav" else b""

    def feed(self, samples: Samples) -> bytes:
        """The same samples; before the first ones the head."""
        return self.finish() + pcm16(samples)

    def finish(self) -> bytes:
        """The head, if there was no sound."""
        head, self._head = self._head, b""
        return head


class FileEncoder:
    """FLAC, MP3 and Opus in Ogg, by libsndfile."""

    def __init__(self, name: str, rate: int) -> None:
        container, subtype = SOUNDFILE_FORMATS[name]
        if name == "opus" and rate not in OPUS_RATES:
            raise bad_field("response_format", f"Opus does not support {rate} Hz.", "unsupported_value")
        self.sink = _Sink()
        # Readers estimate the length of a stream from its first bytes, which a variable bit rate would falsify.
        mode = {"compression_level": 0.5, "bitrate_mode": "CONSTANT"} if name == "mp3" else {}
        self._file = soundfile.SoundFile(self.sink, "w", rate, 1, subtype, format=container, **mode)

    def feed(self, samples: Samples) -> bytes:
        """Bytes that are complete after samples f32 [n]; may be none."""
        self._file.write(samples)
        return self.sink.take()

    def finish(self) -> bytes:
        """The last frames of the file."""
        self._file.close()
        return self.sink.take()


class AacEncoder:
    """AAC by FFmpeg, in ADTS, whose frames stand alone, or as the sound of the file `into`."""

    def __init__(self, rate: int, into: Any = None) -> None:
        import av  # here, because its import takes as long as that of the rest of the server

        if rate not in AAC_RATES:
            raise bad_field("response_format", f"AAC does not support {rate} Hz.", "unsupported_value")
        self._frame = av.AudioFrame
        self._rate = rate
        self._given = 0  # samples
        self.sink = _Sink()
        self._file = into or av.open(self.sink, "w", format="adts")
        self._stream = self._file.add_stream("aac", rate=rate, layout="mono")
        self._stream.bit_rate = AAC_BITS
        self._pieces = av.AudioResampler("fltp", "mono", rate, frame_size=self._stream.codec_context.frame_size or 1024)

    def feed(self, samples: Samples) -> bytes:
        """Bytes of the frames that are complete after samples f32 [n]; may be none."""
        clipped = numpy.ascontiguousarray(numpy.clip(samples, -1.0, 1.0), numpy.float32)
        frame = self._frame.from_ndarray(clipped[None, :], "fltp", "mono")
        frame.sample_rate, frame.pts = self._rate, self._given
        self._given += len(samples)
        for piece in self._pieces.resample(frame):
            self._file.mux(self._stream.encode(piece))
        return self.sink.take()

    def end(self) -> None:
        """Write the last frames."""
        for piece in self._pieces.resample(None) if self._given else ():
            self._file.mux(self._stream.encode(piece))
        self._file.mux(self._stream.encode())

    def finish(self) -> bytes:
        """The last frames; nothing follows."""
        self.end()
        self._file.close()
        return self.sink.take()


class Tempo:
    """Has the sound of an answer heard `speed` times as fast, at the same pitch, by FFmpeg's `atempo`."""

    def __init__(self, speed: float) -> None:
        import av.filter

        self._av = av
        # `atempo` blends windows of sound from 0.5 to 2, beyond which two of them do half the work each.
        self._steps = [speed] if 0.5 <= speed <= 2 else 2 * [math.sqrt(speed)]
        self._graph: Any = None  # made with the first sound, which says its rate
        self._rate = self._given = 0  # Hz, and samples

    async def follow(self, item: StreamItem | None) -> list[StreamItem | None]:
        """What the next item of an answer becomes; `None` is its end."""
        if isinstance(item, Audio):
            return [*await asyncio.to_thread(self.feed, item.samples, item.sample_rate)]
        return [*self.rest(), None] if item is None else [item]

    async def over(self, items: AsyncIterable[StreamItem]) -> AsyncIterator[StreamItem]:
        """What all items of an answer become."""
        async for item in items:
            for heard in [one for one in await self.follow(item) if one is not None]:
                yield heard
        for heard in [one for one in await self.follow(None) if one is not None]:
            yield heard

    def rest(self) -> list[Audio]:
        """What is left at the end."""
        if self._graph is None:
            return []
        self._graph.push(None)
        return self._ready()

    def feed(self, samples: Samples, rate: int) -> list[Audio]:
        """The next sound."""
        if self._graph is None:
            self._rate, self._graph = rate, self._av.filter.Graph()
            source = self._graph.add_abuffer(sample_rate=rate, format="flt", layout="mono", time_base=Fraction(1, rate))
            steps = [self._graph.add("atempo", str(step)) for step in self._steps]
            self._graph.link_nodes(source, *steps, self._graph.add("abuffersink")).configure()
        frame = self._av.AudioFrame.from_ndarray(numpy.ascontiguousarray(samples)[None, :], "flt", "mono")
        frame.sample_rate, frame.pts = rate, self._given
        self._given += len(samples)
        self._graph.push(frame)
        return self._ready()

    def _ready(self) -> list[Audio]:
        pieces: list[Samples] = []
        with contextlib.suppress(BlockingIOError, EOFError):  # it has no more until it is given more, or at all
            while True:
                pieces.append(self._graph.pull().to_ndarray()[0])
        return [Audio(numpy.concatenate(pieces), self._rate)] if pieces else []


class PacedEncoder:
    """Has another encoder write sound down that is heard at a speed."""

    def __init__(self, encoder: Encoder, tempo: Tempo, rate: int) -> None:
        self._encoder, self._tempo, self._rate = encoder, tempo, rate

    def feed(self, samples: Samples) -> bytes:
        """Bytes that are complete after samples f32 [n]; may be none."""
        return self._written(self._tempo.feed(samples, self._rate))

    def finish(self) -> bytes:
        """The last bytes."""
        return self._written(self._tempo.rest()) + self._encoder.finish()

    def _written(self, heard: list[Audio]) -> bytes:
        return b"".join(self._encoder.feed(one.samples) for one in heard)


def codec_of(name: str, rate: int) -> AacEncoder | FileEncoder:
    """What compresses sound. Raises `HttpError` 400 for the rate."""
    return AacEncoder(rate) if name == "aac" else FileEncoder(name, rate)


def encoder_of(name: str, rate: int, speed: float | None = None) -> Encoder:
    """What makes a stream in one of `MEDIA_TYPES`, heard at a speed. Raises `HttpError` 400 for the rate."""
    encoder: Encoder = PcmEncoder(name, rate) if name in ("pcm", "wav") else codec_of(name, rate)
    return encoder if speed in (None, 1) else PacedEncoder(encoder, Tempo(speed), rate)


async def made_encoder(name: str, rate: int, speed: float | None) -> Encoder:
    """The same as `encoder_of`, in a thread: what some take is imported with the first of them."""
    return await asyncio.to_thread(encoder_of, name, rate, speed)


async def fed(encoder: Encoder, samples: Samples) -> bytes:
    """Feed an encoder; a codec takes up to a tenth of a second, in a thread, so that other answers go on."""
    if isinstance(encoder, PcmEncoder):
        return encoder.feed(samples)
    return await asyncio.to_thread(encoder.feed, samples)


async def encoded(samples: Samples, name: str, rate: int) -> bytes:
    """The same as `encode`, with codecs in a thread."""
    return await asyncio.to_thread(encode, samples, name, rate)


async def encoded_base64(samples: Samples, name: str, rate: int) -> msgspec.Raw:
    """The same in base64 as a string of JSON."""
    return await asyncio.to_thread(lambda: base64_string(encode(samples, name, rate)))


def encode(samples: Samples, name: str, rate: int) -> bytes:
    """Encode all samples at once; unlike in a stream, the header states their length."""
    if name in ("wav", "pcm", "pcm16"):
        data = pcm16(samples)
        return wav_header(rate, len(data)) + data if name == "wav" else data
    encoder = codec_of(name, rate)
    if len(samples):
        encoder.feed(samples)
    encoder.finish()
    return encoder.sink.getvalue()
