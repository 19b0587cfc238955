"""Sound on the wire, and the session's own: PCM of 16 bits at `RATE`. Converted piece by piece, without seams."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy
from numpy.typing import NDArray

from omni_actors.http_server.realtime.config import RATE, WireFormat

Samples = NDArray[numpy.int16]


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
    codes = numpy.arange(256)
    if law == "audio/pcmu":
        codes = ~codes & 0xFF
        size = ((((codes & 15) << 3) + 132) << (codes >> 4 & 7)) - 132
        return numpy.where(codes & 0x80, -size, size).astype(numpy.int16)
    codes ^= 0x55
    segment, step = codes >> 4 & 7, (codes & 15) << 4
    size = numpy.where(segment == 0, step + 8, (step + 264) << numpy.maximum(segment - 1, 0))
    return numpy.where(codes & 0x80, size, -size).astype(numpy.int16)


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
