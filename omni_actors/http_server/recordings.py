"""Recordings as requests of the pipeline: one that is too long for a model is cut at quiet places and heard in parts.

Where to cut is as in Qwen's package `qwen-asr`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy

from omni_actors.client import ChoiceItem, RequestStream
from omni_actors.http_server.bodies import reserve
from omni_actors.http_server.encoders import Samples, encode
from omni_actors.http_server.state import ServerState
from omni_actors.media.limits import AUDIO_RATE
from omni_actors.protocol.messages import StageUsage
from omni_actors.protocol.payloads import HearingAbility

SEARCH_SECONDS = 5.0  # before and after where a cut would be, for a quiet place
QUIET_SECONDS = 0.1
LEAST_SECONDS = 0.5  # of the last part, which silence follows


class Stretch(NamedTuple):
    """A part of a recording: a file, and where it begins and ends, in seconds."""

    data: bytes
    start: float
    end: float


def quiet_cuts(samples: Samples, rate: int, seconds: float) -> list[int]:
    """Where samples f32 [n] at `rate` Hz are cut into parts of about `seconds`, which are more than `SEARCH_SECONDS`.

    Each cut is at the quietest sample of the quietest tenth of a second around.
    """
    cuts, start, quiet = [], 0, round(QUIET_SECONDS * rate)
    while len(samples) - start > seconds * rate:
        begin = start + round((seconds - SEARCH_SECONDS) * rate)
        loudness = numpy.abs(samples[begin : begin + round(2 * SEARCH_SECONDS * rate)])
        sums = numpy.cumsum(loudness, dtype=numpy.float64)
        place = int(numpy.argmin(sums[quiet:] - sums[:-quiet])) + 1 if len(loudness) > quiet else 0
        start = begin + place + int(numpy.argmin(loudness[place : place + quiet]))
        cuts.append(start)
    return cuts


async def parts_of(file: bytes, state: ServerState, abilities: Sequence[HearingAbility]) -> list[Stretch]:
    """The parts of an uploaded recording: itself if the models hear it as a whole; its end is 0 if it does not say it.

    Args:
        abilities: those of the models; none of one whose limit is that of all media.

    Raises:
        HttpError: 400 or 413, as for the media of messages.
    """
    seconds = await state.media.seconds(file, "file")
    most = min((ability.max_seconds for ability in abilities), default=math.inf) - SEARCH_SECONDS
    if 0 < seconds <= most or not abilities:
        return [Stretch(file, 0.0, seconds)]
    longest = state.settings.audio_seconds
    reserve(round((seconds or longest) * AUDIO_RATE) * numpy.dtype(numpy.float32).itemsize)
    samples = await state.media.samples(file, "file", AUDIO_RATE, longest)
    return await asyncio.to_thread(_cut, samples, most)


def _cut(samples: Samples, seconds: float) -> list[Stretch]:
    places = [0, *quiet_cuts(samples, AUDIO_RATE, seconds), len(samples)]
    parts = []
    for start, end in itertools.pairwise(places):
        silence = max(0, round(LEAST_SECONDS * AUDIO_RATE) - (end - start))
        data = encode(numpy.pad(samples[start:end], (0, silence)), "flac", AUDIO_RATE)
        parts.append(Stretch(data, start / AUDIO_RATE, end / AUDIO_RATE))
    return parts


class PartStreams:
    """The answers to requests that are computed at the same time, one after the other; `choice` numbers them."""

    def __init__(self) -> None:
        self.usages: list[dict[str, StageUsage]] = []
        self.streams: list[RequestStream] = []

    @property
    def ready(self) -> bool:
        """Whether the next step of the iteration need not wait."""
        return bool(self.streams) and self.streams[0].unread > 0

    async def __anext__(self) -> ChoiceItem:
        if not self.streams:
            raise StopAsyncIteration
        part = len(self.usages)
        try:
            return ChoiceItem(part, await anext(self.streams[0]))
        except StopAsyncIteration:
            self.usages.append(self.streams.pop(0).usage)
            return ChoiceItem(part, None)

    async def abort(self) -> None:
        """End all requests that have not ended. Idempotent."""
        for stream in self.streams:
            await stream.abort()
