"""The coordinator and the HTTP server as processes of the launcher; tests/process has the real ones."""

from __future__ import annotations

import pytest

from omni_actors.launcher.children import LAST, last_words


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            f"listening\nTraceback:\n  File x\nOSError: no file\n\n2026 ERROR http uvicorn.error: {LAST}\n",
            "OSError: no file",
        ),
        ("ModuleNotFoundError: No module named 'av'\n", "No module named 'av'. Run pip install"),
        ("\n", "its log is empty"),
    ],
)
def test_what_is_said_of_a_server_that_does_not_start_is_the_reason(log: str, words: str) -> None:
    assert words in last_words(log)
