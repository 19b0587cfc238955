"""What a process notes of its start: the seconds of its phases, and imports that failed in the fork server.

The server of `multiprocessing` skips a module that cannot be imported, and ends silently at any other error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_seconds: dict[str, float] = {}
_inner: list[float] = []  # for each phase that goes on: seconds of the phases within it that have ended


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Time a phase; also a decorator. What phases within it take counts for those alone."""
    began = time.monotonic()
    _inner.append(0.0)
    try:
        yield
    finally:
        spent = time.monotonic() - began
        note(name, spent - _inner.pop())
        if _inner:
            _inner[-1] += spent


def note(name: str, seconds: float) -> None:
    """Add to a phase that was timed in another way."""
    _seconds[name] = _seconds.get(name, 0.0) + seconds


def seconds() -> Mapping[str, float]:
    """All phases so far, in the order in which they ended."""
    return dict(_seconds)


def listed() -> str:
    """The phases as a log line shows them."""
    return ", ".join(f"{name} {spent:.2f}" for name, spent in _seconds.items())


FAILURES: list[str] = []  # a sentence each, with the module's name
