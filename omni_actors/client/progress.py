"""The progress of a call that answers many prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from omni_actors.errors import InvalidRequest
from omni_actors.protocol.client import Description

TITLE = "Processed prompts"


def start_line(description: Description, seconds: float) -> str:
    """How far a pipeline's start has come, for `logs.redraw`."""
    states = {f"{stage.stage}/{stage.replica}": stage.state for stage in description.stages}
    missing = [f"{name} ({state})" for name, state in states.items() if state != "ready"]
    return f"{len(states) - len(missing)} of {len(states)} ready after {seconds:.0f} s; missing: {', '.join(missing)}"


class ProgressBar(Protocol):
    """What is used of a `tqdm` object."""

    def update(self, n: int) -> Any:
        """Count `n` more prompts."""

    def close(self) -> None:
        """Show nothing more."""


class TerminalBar:
    """A bar on standard error."""

    def __init__(self, total: int) -> None:
        from rich.console import Console  # takes 0.1 s, which only those who see a bar should wait for
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            *Progress.get_default_columns()[:2],
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(file=sys.stderr))
        self._task = self._progress.add_task(TITLE, total=total)
        self._progress.start()

    def update(self, n: int) -> None:
        """Count `n` more prompts."""
        self._progress.advance(self._task, n)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


class NoBar:
    """Shows nothing."""

    def update(self, n: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def progress_bar(total: int, use_tqdm: bool | Callable[..., ProgressBar]) -> ProgressBar:
    """Return a started bar for `total` prompts.

    Args:
        use_tqdm: `True` for a bar on standard error if that is a terminal, `False` for none, or a class such as `tqdm`,
            called with the keywords of vLLM: `total`, `desc`, `dynamic_ncols`.

    Raises:
        InvalidRequest: `use_tqdm` is something else.
    """
    if callable(use_tqdm):
        return use_tqdm(total=total, desc=TITLE, dynamic_ncols=True)
    if not isinstance(use_tqdm, bool):
        raise InvalidRequest(f"use_tqdm is True, False or a class such as tqdm; got {use_tqdm!r}.")
    return TerminalBar(total) if use_tqdm and sys.stderr.isatty() else NoBar()
