"""ElevenLabs' output formats: what comes out is read again."""

from __future__ import annotations

import io

import numpy
import pytest
import soundfile

from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.realtime.formats import g711_levels
from omni_actors.http_server.speech.elevenlabs import WireSound

RATE = 24_000
TONE = (0.5 * numpy.sin(2 * numpy.pi * 440 * numpy.arange(RATE) / RATE)).astype(numpy.float32)
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
