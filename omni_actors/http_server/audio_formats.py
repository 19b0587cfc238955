"""Encode samples in an audio format, all at once or as a stream."""

from __future__ import annotations

import asyncio
import io
import struct
from typing import Protocol

import msgspec
import numpy
import soundfile
from numpy.typing import NDArray

from omni_actors.http_server.decoding import base64_string
from omni_actors.http_server.errors import HttpError

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


class Encoder(Protocol):
    """Encodes chunks of samples as a stream of bytes."""

    def begin(self) -> bytes:
        """The bytes before the first sample."""

    def feed(self, samples: Samples) -> bytes:
        """The bytes that are complete after these samples, f32 [samples] in [-1, 1]."""

    def finish(self) -> bytes:
        """The remaining bytes."""


def pcm16(samples: Samples) -> bytes:
    """Little-endian 16-bit samples of f32 [samples], clipped to [-1, 1]."""
    scaled = numpy.clip(samples, -1.0, 1.0)
    scaled *= 32767.0
    return numpy.rint(scaled, out=scaled).astype("<i2").tobytes()


def wav_header(rate: int, n_bytes: int | None) -> bytes:
    """The 44 bytes before mono PCM16 samples at `rate` Hz; `n_bytes` is `None` if their length is unknown."""
    data = UNKNOWN_LENGTH if n_bytes is None else n_bytes
    riff = UNKNOWN_LENGTH if n_bytes is None else n_bytes + 36
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16, b"data", data
    )


class PcmEncoder:
    """Plain samples, with or without a WAV header."""

    def __init__(self, rate: int, wav: bool) -> None:
        self._header = wav_header(rate, None) if wav else b""

    def begin(self) -> bytes:
        """The WAV header with an unknown length, or nothing."""
        return self._header

    def feed(self, samples: Samples) -> bytes:
        """Samples f32 [n] as 16-bit PCM."""
        return pcm16(samples)

    def finish(self) -> bytes:
        """Nothing: no sample is held back."""
        return b""


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


class FileEncoder:
    """FLAC, MP3 and Opus in Ogg, by libsndfile."""

    def __init__(self, name: str, rate: int) -> None:
        container, subtype = SOUNDFILE_FORMATS[name]
        if name == "opus" and rate not in OPUS_RATES:
            raise HttpError(400, f"Opus does not support {rate} Hz.", param="response_format", code="unsupported_value")
        self._sink = _Sink()
        # Readers estimate the length of a stream from its first bytes, which a variable bit rate would falsify.
        mode = {"compression_level": 0.5, "bitrate_mode": "CONSTANT"} if name == "mp3" else {}
        self._file = soundfile.SoundFile(self._sink, "w", rate, 1, subtype, format=container, **mode)

    def begin(self) -> bytes:
        """Nothing: libsndfile writes its header with the first samples."""
        return b""

    def feed(self, samples: Samples) -> bytes:
        """Bytes that are complete after samples f32 [n]; may be none."""
        self._file.write(samples)
        return self._sink.take()

    def finish(self) -> bytes:
        """The last frames of the file."""
        self._file.close()
        return self._sink.take()


async def feed(encoder: Encoder, samples: Samples) -> bytes:
    """Feed an encoder. A codec takes up to a tenth of a second; it works in a thread, so that other answers go on."""
    if isinstance(encoder, FileEncoder):
        return await asyncio.to_thread(encoder.feed, samples)
    return encoder.feed(samples)


class AacEncoder:
    """AAC in ADTS, whose frames stand alone, by FFmpeg."""

    def __init__(self, rate: int) -> None:
        try:
            import av  # takes as long to import as the rest of the server
        except ImportError:
            raise _no_format("AAC needs PyAV, which the server lacks: its operator must install it.") from None
        if rate not in AAC_RATES:
            raise _no_format(f"AAC does not support {rate} Hz.")
        self._frame = av.AudioFrame
        self._rate = rate
        self._given = 0  # samples
        self._sink = _Sink()
        self._file = av.open(self._sink, "w", format="adts")
        self._stream = self._file.add_stream("aac", rate=rate, layout="mono")
        self._stream.bit_rate = AAC_BITS
        self._pieces = av.AudioResampler("fltp", "mono", rate, frame_size=self._stream.codec_context.frame_size or 1024)

    def begin(self) -> bytes:
        """Nothing: ADTS has no header before the first frame."""
        return b""

    def feed(self, samples: Samples) -> bytes:
        """Bytes of the frames that are complete after samples f32 [n]; may be none."""
        clipped = numpy.ascontiguousarray(numpy.clip(samples, -1.0, 1.0), numpy.float32)
        frame = self._frame.from_ndarray(clipped[None, :], "fltp", "mono")
        frame.sample_rate, frame.pts = self._rate, self._given
        self._given += len(samples)
        for piece in self._pieces.resample(frame):
            self._file.mux(self._stream.encode(piece))
        return self._sink.take()

    def finish(self) -> bytes:
        """The last frames."""
        for piece in self._pieces.resample(None) if self._given else ():
            self._file.mux(self._stream.encode(piece))
        self._file.mux(self._stream.encode())
        self._file.close()
        return self._sink.take()


def _no_format(message: str) -> HttpError:
    return HttpError(400, message, param="response_format", code="unsupported_value")


def make_encoder(name: str, rate: int) -> Encoder:
    """An encoder for one stream in one of `MEDIA_TYPES`."""
    if name in SOUNDFILE_FORMATS:
        return FileEncoder(name, rate)
    if name == "aac":
        return AacEncoder(rate)
    return PcmEncoder(rate, wav=name == "wav")


async def encoded(samples: Samples, name: str, rate: int) -> bytes:
    """The same as `encode`, with codecs in a thread."""
    return await asyncio.to_thread(encode, samples, name, rate)


async def encoded_base64(samples: Samples, name: str, rate: int) -> msgspec.Raw:
    """The same in base64 as a string of JSON."""
    return await asyncio.to_thread(lambda: base64_string(encode(samples, name, rate)))


def encode(samples: Samples, name: str, rate: int) -> bytes:
    """Encode all samples at once; unlike in a stream, the header states their length."""
    if name == "aac":
        encoder = AacEncoder(rate)
        return encoder.feed(samples) + encoder.finish() if len(samples) else encoder.finish()
    if name not in SOUNDFILE_FORMATS:
        data = pcm16(samples)
        return wav_header(rate, len(data)) + data if name == "wav" else data
    sink = io.BytesIO()
    container, subtype = SOUNDFILE_FORMATS[name]
    with soundfile.SoundFile(sink, "w", rate, 1, subtype, format=container) as file:
        file.write(samples)
    return sink.getvalue()
