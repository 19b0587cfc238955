"""What a terminal, and what a file gets to see of progress; sound that is played through a stand-in."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types

import numpy
import pytest

from omni_actors import logs
from omni_actors.cli.chat import find_speaker
from tests.support.waiting import until


def read_all(master: int) -> str:
    """What was written to a terminal that is closed by now."""
    text = b""
    with open(master, "rb", buffering=0) as screen, contextlib.suppress(OSError):  # Linux ends it with EIO
        while piece := screen.read(65536):
            text += piece
    return text.decode()


def test_a_terminal_has_one_line_that_is_redrawn_and_everything_else_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    master, slave = os.openpty()
    with open(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        logs.redraw("1 of 4 ready after 2 s; missing: a very long list of stages", is_line=True)
        logs.say("HTTP on http://127.0.0.1:8000")
        logs.redraw("2 of 4")
        logs.complain("error: it failed")
        logs.redraw("4 of 4")
        logs.redraw("")
    shown = read_all(master).split("\r\x1b[2K")
    assert shown == [
        "",
        "[omni_actors] 1 of 4 ready after 2 s; …",
        "[omni_actors] HTTP on http://127.0.0.1:8000\r\n",
        "[omni_actors] 2 of 4",
        "error: it failed\r\n",
        "[omni_actors] 4 of 4",
        "",
    ]


def test_a_file_gets_plain_lines_and_only_those_that_are_due(capsys: pytest.CaptureFixture[str]) -> None:
    logs.redraw("1 of 4 ready")
    logs.redraw("2 of 4 ready", is_line=True)
    logs.redraw("")
    assert capsys.readouterr().err == "[omni_actors] 2 of 4 ready\n"


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
