"""`omni-actors chat` in a terminal and from a file, and how commands find their pipeline."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

import pytest
import soundfile

from omni_actors.cli import chat, ctl, top
from omni_actors.client import OmniClient
from tests.support.launcher import EchoLauncher
from tests.support.paths import REPOSITORY
from tests.support.waiting import PATIENCE, until


def test_commands_find_the_only_pipeline_and_fail_at_once_where_none_listens(echo, monkeypatch, capsys):
    monkeypatch.delenv("OMNI_ACTORS_ENDPOINT", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(echo.folder))  # as that of its launcher
    assert ctl.main(["status"]) == 0
    assert "code2wav/0: ready" in capsys.readouterr().out
    for command, arguments in ((ctl, ["status", "--endpoint"]), (top, [])):
        assert command.main([*arguments, "ipc:///tmp/nowhere/client"]) == 1
        said = capsys.readouterr().err
        assert "Nothing listens at ipc:///tmp/nowhere/client: No such file or directory." in said
    assert f"Running here: {echo.endpoint}." in said


def test_a_chat_from_a_file_has_voices_media_and_a_history(echo, tmp_path, monkeypatch, capsys):
    sound = tmp_path / "a b.wav"
    question = tmp_path / "question.wav"
    soundfile.write(question, [0.0] * 800, 16000)
    lines = ["The tide is full.", "/save nothing.wav", "/voice Ethn", "/voice Ethan", "And the moon is fair."]
    lines += [f"/save {sound}", "/vioce", "/audio", f"/audio {tmp_path}/none.wav", f"/audio {question}"]
    lines += ["What do you hear?", "/new", "/voice off", " /slash", "/quit", "This is not asked."]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert chat.main([echo.endpoint]) == 0
    shown, said = capsys.readouterr()
    answers = shown.splitlines()
    assert answers[0] == "The tide is full."
    assert answers[1].endswith("And the moon is fair.")
    assert answers[1] != "And the moon is fair.", "what was said before is part of the question"
    assert answers[2].endswith("What do you hear?")
    assert answers[3:] == ["/slash"], "the rest was forgotten, and then it ended"
    for words in (
        "The last answer had no sound. Choose a /voice",
        "There is no voice 'Ethn'. Did you mean 'Ethan'?",
        "voice: Ethan",
        f"of audio to {sound}",
        "There is no command '/vioce'. Did you mean '/voice'?",
        "/audio needs the name of a file.",
        "none.wav: No such file",
        "question.wav goes with the next message",
        "answers are text only",
    ):
        assert words in said
    assert soundfile.info(sound).duration > 0


@contextmanager
def terminal(launcher: EchoLauncher) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    master, slave = os.openpty()
    environment = {**os.environ, "TERM": "dumb"}
    process = subprocess.Popen(
        [sys.executable, "-m", "omni_actors", "chat", launcher.endpoint],
        cwd=REPOSITORY,
        env=environment,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        # Ctrl-C is ignored, and stays so, in all that runs below a shell's background job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(slave)
    os.set_blocking(master, False)
    with open(master, "r+b", buffering=0) as screen:
        try:
            yield process, screen
        finally:
            process.kill()
            process.wait()


@pytest.mark.timeout(600)
def test_ctrl_c_at_any_point_of_a_call_leaves_the_client_as_it_was(echo):
    """It comes before each line of Python that a call runs, and before each return, of libraries as well."""

    def interrupted(call: Callable[[], object], point: int) -> bool:
        points = itertools.count()

        def trace(_: FrameType, event: str, __: object) -> Any:
            if event in ("line", "return") and next(points) == point:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        assert next(points) <= point, "Ctrl-C is ignored"
        return False

    with OmniClient(echo.endpoint) as client, ThreadPoolExecutor(1) as thread:
        point = 0
        while interrupted(lambda: client.run(lambda _: asyncio.sleep(0.001)), point):
            assert thread.submit(client.describe).result(10 * PATIENCE).pipeline, f"after {point} points"
            point += 1
    assert point > 10


def test_ctrl_c_cancels_the_answer_everywhere_and_ctrl_d_ends(echo):
    shown = ""

    def appears(words: str) -> bool:
        nonlocal shown
        shown += (screen.read(65536) or b"").decode(errors="replace")
        return words in shown

    def types(line: bytes) -> None:
        nonlocal shown
        shown = ""
        screen.write(line)

    with terminal(echo) as (process, screen), OmniClient(echo.endpoint) as client:
        until(lambda: appears("> "), 20, "the prompt")
        types(b"slow " * 600 + b"\n")
        until(lambda: client.describe().in_flight == 1, 10, "a request")
        until(lambda: appears("\nslow slow"), 10, "words of the answer")
        process.send_signal(signal.SIGINT)
        until(lambda: appears("cancelled"), 10, "the end of the answer")
        until(lambda: client.describe().in_flight == 0, 10, "the end of the request")
        types(b"/new\n")
        until(lambda: appears("forgotten"), 10, "a new conversation")
        types(b"short\n")
        until(lambda: appears("short\r\nshort\r\n> "), 10, "an answer")
        shown = ""
        process.send_signal(signal.SIGINT)  # at the prompt: nothing to cancel
        until(lambda: appears("> "), 10, "a new prompt")
        types(b"\x04")
        assert process.wait(10) == 0
