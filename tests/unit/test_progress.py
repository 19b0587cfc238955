"""What a terminal, and what a file gets to see of progress: of `OmniLLM.generate` and of a start."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys

import pytest

from omni_actors import logs
from omni_actors.client.progress import progress_bar


def read_all(master: int) -> str:
    """What was written to a terminal that is closed by now."""
    text = b""
    with open(master, "rb", buffering=0) as screen, contextlib.suppress(OSError):  # Linux ends it with EIO
        while piece := screen.read(65536):
            text += piece
    return text.decode()


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    with open(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        bar = progress_bar(7, True)
        bar.update(3)
        bar.update(1)
        bar.close()
    shown = read_all(master)
    assert "Processed prompts" in shown
    assert "4/7" in shown


@pytest.mark.parametrize("wanted", [True, False])
def test_a_file_gets_none(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    output = io.StringIO()
    monkeypatch.setattr(sys, "stderr", output)
    bar = progress_bar(2, wanted)
    bar.update(2)
    bar.close()
    assert output.getvalue() == ""


def test_a_terminal_gets_none_either_if_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    bar = progress_bar(2, False)
    bar.update(2)
    bar.close()
    assert terminal.getvalue() == ""


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


def test_times_count_from_the_start_of_the_process() -> None:
    program = """
import time; time.sleep(0.5)
from omni_actors.host.processes import process_start
print(time.monotonic() - process_start())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert 0.5 <= float(done.stdout) < 60
