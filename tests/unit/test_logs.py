"""What logs and terminals show: exceptions that may quote a prompt, floods, progress; and sound that is played."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy
import pytest

from omni_actors import logs
from omni_actors.cli.chat import find_speaker
from omni_actors.errors import EngineError
from omni_actors.logs import LINES, trace_of
from tests.support.waiting import until


def divide(text: str) -> None:
    try:
        int(text)
    except ValueError as error:
        raise EngineError(f"no number: {text}") from error


def trace(text: str) -> str:
    try:
        divide(text)
    except EngineError as error:
        return trace_of(error)
    return ""


def test_a_trace_names_types_and_places_and_no_message() -> None:
    lines = trace("a secret").splitlines()
    assert "a secret" not in "".join(lines)
    assert lines[0] == "omni_actors.errors.EngineError"
    assert lines[3] == "because of builtins.ValueError"
    places = [line.rpartition("/")[2] for line in (*lines[1:3], lines[4])]
    assert [place.partition(":")[0] for place in places] == ["test_logs.py"] * 3
    assert [place.rpartition(" in ")[2] for place in places] == ["trace", "divide", "divide"]


FLOOD = """
import logging, os, sys
from omni_actors import logs
logs.redirect_output(sys.argv[1])
logs.configure("flood", sys.argv[1])
logger = logs.get_logger("flood")
def flood(count):
    for number in range(count):
        logger.warning("dropped a message: %s", "x" * 50)
flood(8000)
for number in range(20):
    logger.info("request %d", number)
    logger.error("%s", f"talker/{number} died")
os.unlink(sys.argv[1])
logger.info("after")
logs.PERIOD_SECONDS = 0.0
logger.info("later")
flood(1)
print("plain output", flush=True)
"""


def test_a_flood_is_bounded_and_a_removed_file_is_made_again(tmp_path: Path) -> None:
    log, second = tmp_path / "log", tmp_path / "second"
    run = subprocess.Popen(
        [
            sys.executable,
            "-c",
            FLOOD.replace("os.unlink(", f"os.link(sys.argv[1], {str(second)!r}); os.unlink("),
            str(log),
        ]
    )
    assert run.wait(60) == 0
    before, after = second.read_text(), log.read_text()
    assert before.count("dropped a message") == LINES
    assert before.count("INFO") == before.count("died") == 20
    assert "after\n" in after
    assert f"{8000 - LINES} lines like this one were left out: dropped a message: xxx" in after
    assert after.count("left out: dropped a message") == 1
    assert after.count("dropped a message") == 2, "a place may log again after a while"
    assert after.endswith("plain output\n")
    assert os.stat(log).st_mode & 0o777 == 0o600


def test_output_that_cannot_be_written_stops_nothing() -> None:
    """As on a full disk; a terminal that is gone fails in the same way."""
    code = (
        "from omni_actors import logs; logs.configure('x'); logs.say('a'); logs.get_logger('x').error('b'); print('on')"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stderr=full, stdout=subprocess.PIPE, check=False, timeout=60
        )
    assert done.stdout == b"on\n"


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
