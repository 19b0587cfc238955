"""Playing sound through `sounddevice`. A stand-in for that module plays, as hosts of tests have no sound device."""

from __future__ import annotations

import sys
import threading
import types

import numpy
import pytest

from omni_actors.cli.chat import find_speaker
from tests.support.waiting import until


class PortAudioError(Exception):
    """As in sounddevice."""


class Device(types.ModuleType):
    """Holds back what is played until `go` is set."""

    PortAudioError = PortAudioError

    def __init__(self, has_output: bool = True) -> None:
        super().__init__("sounddevice")
        self.has_output = has_output
        self.rates: list[int] = []
        self.played: list[float] = []
        self.go = threading.Event()

    def query_devices(self, kind: str) -> None:
        if not self.has_output:
            raise PortAudioError("no output")

    def OutputStream(self, samplerate: int, channels: int, dtype: str) -> Device:
        assert dtype == "float32"
        assert channels == 1
        self.rates.append(samplerate)
        return self

    def start(self) -> None:
        pass

    def write(self, samples: numpy.ndarray) -> None:
        assert samples.shape[1] == 1
        self.played.append(float(samples[0, 0]))
        assert self.go.wait(10)


def test_sound_is_played_in_order_and_stopped_within_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setitem(sys.modules, "sounddevice", device)
    speaker = find_speaker()
    for loudness in (0.1, 0.2):
        speaker.play(numpy.full(10, loudness, numpy.float32), 50)  # two pieces each
    until(lambda: device.played, 5, "the first piece")
    speaker.stop()
    speaker.play(numpy.full(10, 0.3, numpy.float32), 100)
    device.go.set()
    until(lambda: len(device.played) == 2, 5, "the next answer")
    assert device.played == pytest.approx([0.1, 0.3])
    assert device.rates == [50, 100]
