"""One log format for every process and library: time, level, process, request and stage if known, text.

User content is never logged at info or above.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import sys
import time
import traceback
from typing import TextIO

from omni_actors import envs
from omni_actors.errors import ConfigError

FORMAT = "%(asctime)s %(levelname)s %(omni_process)s%(omni_about)s %(name)s: %(message)s"
LINES, PERIOD_SECONDS = 10, 60.0  # of warnings and errors from one place in the code
LIBRARIES = ("vllm", "transformers", "py.warnings")  # those with their own handlers, or none


class _ProcessFilter(logging.Filter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def filter(self, record: logging.LogRecord) -> bool:
        record.omni_process = self._process
        about = {"request": getattr(record, "request_id", None), "stage": getattr(record, "stage", None)}
        record.omni_about = "".join(f" {key}={value}" for key, value in about.items() if value)
        return True


class LineLimit:
    """Bounds what each place in the code logs, so that a flood of bad messages cannot fill the disk. Pure.

    A place may log `LINES` within `PERIOD_SECONDS`; further ones are counted, and only the last of them is kept.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], _Place] = {}

    def admits(self, record: logging.LogRecord, now: float) -> bool:
        """Count a line at `now` (seconds of any clock) and say whether to write it."""
        place = self._places.setdefault((record.name, record.lineno), _Place(now))
        place.lines += 1
        if place.lines > LINES:
            place.last = record
        return place.lines <= LINES

    def left_out(self, now: float) -> list[tuple[int, logging.LogRecord]]:
        """Forget the periods that are over; return the number and the last of the lines that each left out."""
        over = {key: place for key, place in self._places.items() if now >= place.since + PERIOD_SECONDS}
        for key in over:
            del self._places[key]
        return [(place.lines - LINES, place.last) for place in over.values() if place.last is not None]


@dataclasses.dataclass
class _Place:
    since: float
    lines: int = 0
    last: logging.LogRecord | None = None  # of those left out


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to stderr, at a bounded rate; makes the file behind it again if that was removed or rotated away."""

    def __init__(self, file: str | None) -> None:
        super().__init__(sys.stderr)
        self._file = file
        self._limit = LineLimit()

    def emit(self, record: logging.LogRecord) -> None:
        if self._file is not None and not os.path.exists(self._file):
            with contextlib.suppress(OSError):  # its folder is gone, too, or the disk is full
                redirect_output(self._file)
        if sys.stderr.isatty():
            self.stream.write(_clear_line())
        now = time.monotonic()
        for count, last in self._limit.left_out(now):
            last.msg, last.args = f"{count} lines like this one were left out: {last.getMessage()}", ()
            super().emit(last)
        # Texts that are logged as they are say what was decided about processes, which is bounded already.
        if record.levelno < logging.WARNING or record.msg == "%s" or self._limit.admits(record, now):
            super().emit(record)


def redirect_output(file: str) -> None:
    """Let stdout and stderr of this process go to the end of a file, for the eyes of this user only."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def configure(process: str, file: str | None = None) -> None:
    """Log to stderr as `process`, for instance `talker/0 epoch=2`. Raises `ConfigError` for an unknown level.

    `file` is where stderr goes, if it is to be made again when others remove it.

    A library imported later may replace this; stages import theirs before they call this.
    """
    level = envs.log_level()
    if level not in logging.getLevelNamesMapping():
        hint = "Use debug, info, warning or error."
        raise ConfigError(f"OMNI_ACTORS_LOG_LEVEL: unknown level {level!r}.", hint=hint)
    handler = _Handler(file)
    handler.addFilter(_ProcessFilter(process))
    handler.setFormatter(logging.Formatter(FORMAT))
    for name in ("omni_actors", *LIBRARIES):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    logging.getLogger("omni_actors").setLevel(level)
    # Our debug level must not turn on the flood of a library's.
    logging.getLogger("vllm").setLevel(max(logging.INFO, logging.getLevelNamesMapping()[level]))
    logging.captureWarnings(True)


def say(text: str) -> None:
    """Print a line for the person at the terminal, on stderr: stdout is for the answer."""
    complain(f"[omni_actors] {text}")


def complain(text: str) -> None:
    """The same without a name in front, for errors."""
    with contextlib.suppress(OSError):  # a full disk, or a terminal that is gone, must not end a pipeline
        print(f"{_clear_line()}{text}", file=sys.stderr, flush=True)


def redraw(text: str, is_line: bool = False) -> None:
    """Show a line on the terminal that the next one replaces; "" removes it.

    Where nothing can be redrawn, print it if `is_line`.
    """
    if not sys.stderr.isatty():
        if is_line:
            say(text)
        return
    with contextlib.suppress(OSError):
        width = shutil.get_terminal_size().columns - 1  # a longer one would wrap, and stay
        shown = f"[omni_actors] {text}" if text else ""
        shown = shown if len(shown) <= width else f"{shown[: width - 1]}…"
        print(f"{_clear_line()}{shown}", end="", file=sys.stderr, flush=True)


def _clear_line() -> str:
    """What removes a line from the terminal that `redraw` has left, in whatever process."""
    return "\r\x1b[2K" if sys.stderr.isatty() else ""


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, below that of the package."""
    return logging.getLogger(name if name.startswith("omni_actors") else f"omni_actors.{name}")


def trace_of(error: BaseException) -> str:
    """The type of an exception and of those that led to it, and where each was raised; lines for a log.

    Without their messages, which may quote the input: use it where an exception's text can come from a user's.
    """
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        lines.append(f"{'because of ' if lines else ''}{type(cause).__module__}.{type(cause).__qualname__}")
        lines += [
            f"  {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
            for frame, line in traceback.walk_tb(cause.__traceback__)
        ]
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n".join(lines)
