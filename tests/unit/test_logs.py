"""What a log says of an exception that may quote a prompt, how much it says, and where it is."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from omni_actors.errors import EngineError
from omni_actors.logs import LINES, PERIOD_SECONDS, LineLimit, trace_of


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


def line(number: int, text: str) -> logging.LogRecord:
    return logging.LogRecord("somewhere", logging.WARNING, "", number, text, (), None)


def test_a_place_that_logs_too_much_is_cut_off_and_counted() -> None:
    limit = LineLimit()
    assert [limit.admits(line(1, "a"), 0.0) for _ in range(LINES + 3)] == [True] * LINES + [False] * 3
    assert limit.admits(line(2, "b"), 0.0), "other places go on"
    assert limit.left_out(PERIOD_SECONDS - 1) == []
    ((count, last),) = limit.left_out(PERIOD_SECONDS)
    assert count == 3
    assert last.msg == "a"
    assert limit.admits(line(1, "a"), PERIOD_SECONDS)
    assert limit.left_out(3 * PERIOD_SECONDS) == []


FLOOD = """
import logging, os, sys
from omni_actors import logs
logs.redirect_output(sys.argv[1])
logs.configure("flood", sys.argv[1])
logger = logs.get_logger("flood")
for number in range(8000):
    logger.warning("dropped a message: %s", "x" * 50)
for number in range(20):
    logger.info("request %d", number)
    logger.error("%s", f"talker/{number} died")
os.unlink(sys.argv[1])
logger.info("after")
logs.PERIOD_SECONDS = 0.0
logger.info("later")
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
