"""The progress bar of `OmniLLM.generate` on a terminal and elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import sys

import pytest

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
