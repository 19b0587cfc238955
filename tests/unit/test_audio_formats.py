"""Sound in AAC, at another speed and in ElevenLabs' formats: what comes out is read again."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator

import numpy
import pytest
import soundfile

from omni_actors.client import Audio, StreamItem, Text
from omni_actors.http_server.encoders import Samples, Tempo, encode, encoder_of, fed
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.realtime.formats import g711_levels
from omni_actors.http_server.speech.elevenlabs import WireSound
from omni_actors.media.limits import AUDIO_FILE, AUDIO_RATE, MediaLimits
from omni_actors.media.readers import decode
from omni_actors.sharing import Budget

RATE = 24_000
TONE = (0.5 * numpy.sin(2 * numpy.pi * 440 * numpy.arange(RATE) / RATE)).astype(numpy.float32)


def test_aac_holds_the_sound() -> None:
    limits = MediaLimits()
    samples = decode(AUDIO_FILE, encode(TONE, "aac", RATE), 0, limits, Budget(limits.decoded_bytes), "it")
    assert abs(len(samples) - AUDIO_RATE) < AUDIO_RATE // 8, "coders add and cut a little"
    assert abs(int(numpy.abs(numpy.fft.rfft(samples)).argmax()) * AUDIO_RATE / len(samples) - 440) < 5
    assert abs(float(samples.std()) - 0.5 / numpy.sqrt(2)) < 0.03


@pytest.mark.parametrize("pieces", [1, 7, 100])
async def test_aac_is_streamed_in_frames_that_make_the_same_file(pieces: int) -> None:
    encoder = encoder_of("aac", RATE)
    parts = [await fed(encoder, piece) for piece in numpy.array_split(TONE, pieces)]
    assert pieces == 1 or any(parts[:-1]), "sound is sent before the end"
    assert b"".join([*parts, encoder.finish()]) == encode(TONE, "aac", RATE)


def test_aac_of_nothing_and_of_a_strange_rate() -> None:
    assert encode(numpy.zeros(0, numpy.float32), "aac", RATE) == b""
    assert encode(numpy.full(RATE, 9.0, numpy.float32), "aac", RATE), "samples are clipped"
    with pytest.raises(HttpError, match="23456 Hz"):
        encoder_of("aac", 23_456)


async def items(samples: Samples, pieces: int) -> AsyncIterator[StreamItem]:
    for piece in numpy.array_split(samples, pieces):
        yield Text("la", ())
        yield Audio(piece, RATE)


@pytest.mark.parametrize("speed", [0.25, 0.8, 1.5, 4])
async def test_sound_at_another_speed_has_its_pitch_however_it_is_cut(speed: float) -> None:
    heard = []
    for pieces in (1, 50):
        followed = [item async for item in Tempo(speed).over(items(TONE, pieces))]
        assert followed.count(Text("la", ())) == pieces, "texts pass"
        sounds = [item.samples for item in followed if isinstance(item, Audio)]
        heard.append(numpy.concatenate(sounds))
    assert len(sounds) > 10, "sound comes before the end"
    assert numpy.array_equal(*heard)
    assert abs(len(heard[0]) * speed / RATE - 1) < 0.03
    assert abs(int(numpy.abs(numpy.fft.rfft(heard[0])).argmax()) * RATE / len(heard[0]) - 440) < 5
    assert abs(float(heard[0].std()) - 0.5 / numpy.sqrt(2)) < 0.03


async def test_less_sound_than_a_window_ends() -> None:
    first, *rest = [item async for item in Tempo(2).over(items(TONE[:9], 1))]
    assert first == Text("la", ())
    assert sum(len(item.samples) for item in rest if isinstance(item, Audio)) <= 9


FORMATS = ["pcm_8000", "pcm_22050", "pcm_24000", "pcm_48000", "ulaw_8000", "alaw_8000", "mp3_22050_32", "mp3_44100"]


@pytest.mark.parametrize("name", [*FORMATS, "opus_48000_64"])
def test_sound_has_the_format_and_the_rate_of_its_name(name: str) -> None:
    encoder = WireSound(name, RATE)
    data = b"".join([*map(encoder.feed, numpy.array_split(TONE, 7)), encoder.finish()])
    codec, rate = name.split("_")[0], int(name.split("_")[1])
    match codec:
        case "pcm":
            samples = numpy.frombuffer(data, "<i2") / 32768
        case "ulaw" | "alaw":
            samples = g711_levels(f"audio/pcm{codec[0]}")[numpy.frombuffer(data, numpy.uint8)] / 32768
        case _:
            samples, found = soundfile.read(io.BytesIO(data))
            assert found == rate
    added = 0.1 if codec in ("mp3", "opus") else 0.001
    assert len(samples) / rate == pytest.approx(1, abs=added)
    assert abs(int(numpy.abs(numpy.fft.rfft(samples)).argmax()) * rate / len(samples) - 440) < 2
    assert float(samples.std()) == pytest.approx(0.5 / numpy.sqrt(2), abs=0.05)


@pytest.mark.parametrize("name", ["pcm_11025", "pcm", "ulaw_16000", "mp3_8000_32", "wav_24000", "pcm_24000_1"])
def test_another_format_is_refused(name: str) -> None:
    with pytest.raises(HttpError) as refused:
        WireSound(name, RATE)
    assert (refused.value.param, refused.value.code) == ("output_format", "unsupported_value")
