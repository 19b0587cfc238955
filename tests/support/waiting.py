"""Wait for a condition, with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
What = str | Callable[[], str]  # a text, or a function called at the deadline for more detail
POLL_SECONDS = 0.005
PATIENCE = 4.0  # times the deadline that a test names: a slow machine is no failure, a hang is one after any time


def until(condition: Callable[[], T], seconds: float = 5.0, what: What = "the condition") -> T:
    """Wait until `condition()` is true and return its value.

    Raises:
        TimeoutError: `what` did not happen within `seconds` times PATIENCE.
    """
    seconds *= PATIENCE
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        _check(deadline, seconds, what)
        time.sleep(POLL_SECONDS)
    return value


async def eventually(
    condition: Callable[[], T | Awaitable[T]], seconds: float = 5.0, what: What = "the condition"
) -> T:
    """Do the same without blocking the event loop; the condition may be asynchronous."""
    seconds *= PATIENCE
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        _check(deadline, seconds, what)
        await asyncio.sleep(POLL_SECONDS)


def _check(deadline: float, seconds: float, what: What) -> None:
    if time.monotonic() >= deadline:
        raise TimeoutError(f"waited {seconds} s for {what if isinstance(what, str) else what()}")
