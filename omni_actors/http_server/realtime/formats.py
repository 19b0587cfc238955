"""Sound on the wire, and the session's own: PCM of 16 bits at `RATE`. Converted piece by piece, without seams."""

from __future__ import annotations

import importlib.util
import io
from functools import cache
from typing import Any, Literal

import msgspec
import numpy
import soundfile
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from omni_actors.http_server.bodies import Strict
from omni_actors.http_server.errors import bad_field

RATE = 24_000  # samples a second of all sound inside the route: 16 bits, mono, little-endian
G711_RATE = 8000
BYTES_PER_SECOND = 2 * RATE

Samples = NDArray[numpy.int16]


class WireFormat(Strict, frozen=True):
    """How sound travels: PCM of 16 bits, mono, little-endian, or G.711, which has 8,000 samples a second."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] | None = "audio/pcm"
    rate: Literal[8000, 16000, 24000] | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if self.law is not None and (self.rate or G711_RATE) != G711_RATE:
            raise ValueError(f"{self.type} has {G711_RATE} samples a second")
        msgspec.structs.force_setattr(self, "type", self.type or "audio/pcm")
        msgspec.structs.force_setattr(self, "rate", UNSET if self.law is not None else self.rate or RATE)

    @property
    def law(self) -> str | None:
        """The type, if it is one of G.711."""
        return self.type if self.type != "audio/pcm" else None

    @property
    def hertz(self) -> int:
        """Samples a second."""
        return self.rate or G711_RATE

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample."""
        return 2 if self.law is None else 1


BETA_FORMATS = {"pcm16": WireFormat(), "g711_ulaw": WireFormat("audio/pcmu"), "g711_alaw": WireFormat("audio/pcma")}
AnyFormat = WireFormat | Literal["pcm16", "g711_ulaw", "g711_alaw"]


def wire_format(given: AnyFormat | None, otherwise: WireFormat, where: str) -> WireFormat:
    """The format that a client asks for. Raises `HttpError` 400 if it takes what is not installed."""
    wire = otherwise if given is None else BETA_FORMATS[given] if isinstance(given, str) else given
    if wire.hertz != RATE and importlib.util.find_spec("soxr") is None:
        raise bad_field(where, f"{where}: this server has PCM at 24000 Hz only: install omni_actors[realtime].")
    return wire


class SoundDecoder:
    """Sound of one client as it comes. Where the rate changes, the last 25 ms come with the next piece."""

    def __init__(self, wire: WireFormat) -> None:
        self.wire = wire
        self._resampler = _resampler(wire.hertz, RATE)

    def decode(self, data: bytes, last: bool = False) -> bytes:
        """The next piece; after the `last` one, sound begins anew."""
        if self.wire.law is None:
            samples = numpy.frombuffer(data, "<i2")
        else:
            samples = g711_levels(self.wire.law)[numpy.frombuffer(data, numpy.uint8)]
        return _resampled(self._resampler, samples, last).tobytes()


class SoundEncoder:
    """Sound of one answer as it is made. Where the rate changes, the last 25 ms come with the next piece.

    Args:
        law: of G.711, such as `audio/pcmu`; `None` for PCM.
    """

    def __init__(self, law: str | None, hertz: int, source: int = RATE) -> None:
        self._law = law
        self._resampler = _resampler(source, hertz)

    def encode(self, pcm: bytes, last: bool = False) -> bytes:
        """The next piece."""
        samples = _resampled(self._resampler, numpy.frombuffer(pcm, "<i2"), last)
        return samples.tobytes() if self._law is None else g711_codes(self._law, samples).tobytes()


def _resampler(source: int, target: int) -> Any:
    """`None` where the rate stays."""
    if source == target:
        return None
    import soxr

    return soxr.ResampleStream(source, target, 1, dtype="float32", quality="MQ")


def _resampled(resampler: Any, samples: Samples, last: bool) -> Samples:
    if resampler is None:
        return samples
    found = resampler.resample_chunk(samples.astype(numpy.float32), last=last)
    if last:
        resampler.clear()
    rounded: Samples = numpy.clip(numpy.rint(found), -32768, 32767).astype("<i2")
    return rounded


# ---------------------------------------------------------------------------------------------------------------------
# G.711


@cache
def g711_levels(law: str) -> Samples:
    """The sample of each code."""
    about = {"format": "RAW", "samplerate": G711_RATE, "channels": 1}
    codes, subtype = io.BytesIO(bytes(range(256))), "ULAW" if law == "audio/pcmu" else "ALAW"
    samples: Samples = soundfile.read(codes, dtype="int16", subtype=subtype, **about)[0]
    return samples


def g711_codes(law: str, samples: Samples) -> NDArray[numpy.uint8]:
    """The code of the nearest sample for each of `samples`."""
    codes, borders = _ordered(law)
    return codes[numpy.searchsorted(borders, samples)]


@cache
def _ordered(law: str) -> tuple[NDArray[numpy.uint8], NDArray[numpy.float64]]:
    """All codes by the size of their samples, and the borders between them, at which the nearest one changes."""
    levels = g711_levels(law)
    codes = numpy.argsort(levels, kind="stable")
    ordered = levels[codes].astype(float)
    return codes.astype(numpy.uint8), (ordered[1:] + ordered[:-1]) / 2
