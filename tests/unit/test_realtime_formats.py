"""Sound on the wire of a realtime session: other rates and G.711, both ways."""

from __future__ import annotations

import audioop
from itertools import pairwise

import numpy
import pytest

from omni_actors.http_server.realtime.formats import (
    RATE,
    SoundDecoder,
    SoundEncoder,
    WireFormat,
    g711_codes,
    g711_levels,
)
from omni_actors.http_server.realtime.turns import AudioBuffer, milliseconds
from tests.support.realtime import Talk

PHONE = WireFormat("audio/pcm", 8000)
FORMATS = [PHONE, WireFormat("audio/pcm", 16000), WireFormat("audio/pcmu"), WireFormat("audio/pcma")]
IDS = ["8 kHz", "16 kHz", "u-law", "A-law"]
OF_AUDIOOP = {"audio/pcmu": (audioop.lin2ulaw, audioop.ulaw2lin), "audio/pcma": (audioop.lin2alaw, audioop.alaw2lin)}
EVERY_SAMPLE = numpy.arange(-32768, 32768).astype("<i2")


def tone(hertz: int, seconds: float = 1.0, frequency: float = 440.0) -> numpy.ndarray:
    return (12_000 * numpy.sin(2 * numpy.pi * frequency * numpy.arange(int(seconds * hertz)) / hertz)).astype("<i2")


def pieces(data: bytes, samples: int, sample_bytes: int) -> list[bytes]:
    return [data[start : start + samples * sample_bytes] for start in range(0, len(data), samples * sample_bytes)]


@pytest.mark.parametrize("law", OF_AUDIOOP)
def test_g711_is_that_of_pythons_audioop(law: str) -> None:
    """Decoded exactly; encoded to a sample that is at least as near."""
    encode, decode = OF_AUDIOOP[law]
    assert g711_levels(law).tobytes() == decode(bytes(range(256)), 2)
    ours = g711_levels(law)[g711_codes(law, EVERY_SAMPLE)].astype(int)
    theirs = numpy.frombuffer(decode(encode(EVERY_SAMPLE.tobytes(), 2), 2), "<i2").astype(int)
    assert (abs(ours - EVERY_SAMPLE) <= abs(theirs - EVERY_SAMPLE)).all()


@pytest.mark.parametrize("wire", FORMATS, ids=IDS)
def test_a_tone_passes_both_ways_in_pieces_of_any_size(wire: WireFormat) -> None:
    """The noise of a seam would be far louder than that of 8 bits."""
    given = tone(RATE)
    encoder, decoder = SoundEncoder(wire.law, wire.hertz), SoundDecoder(wire)
    sizes = [1, 7, 240, 480, 999, 5000, 24_000]
    borders = [0, *numpy.cumsum(sizes)]
    sent = b"".join(encoder.encode(given[start:end].tobytes()) for start, end in pairwise(borders))
    sent += encoder.encode(b"", last=True)
    assert len(sent) == wire.hertz * wire.sample_bytes
    heard = b"".join(decoder.decode(piece) for piece in pieces(sent, 160, wire.sample_bytes))
    heard += decoder.decode(b"", last=True)
    found = numpy.frombuffer(heard, "<i2")
    assert len(found) == RATE
    inside = slice(RATE // 20, -RATE // 20)
    assert abs(found[inside].astype(int) - given[inside]).max() < (600 if wire.law else 60)


@pytest.mark.parametrize("wire", FORMATS, ids=IDS)
def test_an_hour_of_sound_has_its_length(wire: WireFormat) -> None:
    buffer = AudioBuffer(10.0, wire)
    second = bytes(wire.hertz * wire.sample_bytes)
    for _ in range(3600):
        buffer.append(second)
        buffer.take()
    assert abs(milliseconds(buffer.end) - 3_600_000) < 50, "but for what the resampler still has"
    buffer.end_sound()
    assert milliseconds(buffer.end) == 3_600_000


def test_the_rest_of_a_sound_does_not_become_part_of_the_next_one() -> None:
    talk = Talk(input_format=WireFormat("audio/pcma"))
    for end in ("input_audio_buffer.clear", "input_audio_buffer.commit"):
        talk.append(audioop.lin2alaw(tone(8000).tobytes(), 2))
        talk.send(end)
        assert talk.session.position % RATE == 0
        assert talk.session.sound_from(0) == b""
        talk.append(audioop.lin2alaw(bytes(16_000), 2))
        assert abs(numpy.frombuffer(talk.session.sound_from(0), "<i2")).max() <= 16, "A-law's smallest sample is 8"
        talk.send("input_audio_buffer.clear")
