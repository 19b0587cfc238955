"""Durations, sizes and states as people read them in the terminal."""

from __future__ import annotations

from omni_actors.protocol.client import StageStatus


def duration(seconds: float) -> str:
    """Three significant digits: `640 µs`, `12.3 ms`, `4.56 s`."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            value = seconds * factor
            return f"{value:.{0 if value >= 100 or unit == 'µs' else 1}f} {unit}"
    return f"{seconds:.2f} s"


def size(n_bytes: float) -> str:
    """Binary units: `44 B`, `7.0 KiB`, `1.5 MiB`."""
    if n_bytes < 1024:
        return f"{n_bytes:.0f} B"
    for unit in ("KiB", "MiB"):
        n_bytes /= 1024
        if n_bytes < 1024:
            return f"{n_bytes:.1f} {unit}"
    return f"{n_bytes / 1024:.1f} GiB"


def state(status: StageStatus) -> str:
    """A replica's state, with what an operator made of it: `ready (spare)`, `draining (leaving)`."""
    marks = {"spare": status.spare, "joining": status.joining, "leaving": status.leaving}
    shown = ", ".join(name for name, applies in marks.items() if applies)
    return f"{status.state} ({shown})" if shown else status.state
