"""How the sound of an answer reaches a listener."""

from __future__ import annotations

AUDIBLE_SECONDS = 0.05  # a gap at least this long is heard as one


class Playback:
    """The arrival of one answer's sound, piece by piece; moments in seconds, all by one clock.

    Two listeners are thought of. One presses play at the first sample and hears a gap wherever the next piece is not
    there yet. The other waits until the earliest moment from which there is none: the smooth start.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Length of the sound so far."""
        self.first = 0.0
        """When the first piece came; 0 while none has."""
        self.smooth_start = 0.0
        """The earliest moment at which to press play and hear no gap in what has come so far."""
        self.longest_gap = 0.0
        """Seconds of the longest gap when play began at `first`."""
        self.runs_out = 0.0
        """When who pressed play at `first` has heard everything that has come so far."""

    def add(self, now: float, seconds: float) -> None:
        """Note a piece that came `now` and is `seconds` long."""
        if not self.first:
            self.first = self.runs_out = now
        self.smooth_start = max(self.smooth_start, now - self.seconds)
        self.longest_gap = max(self.longest_gap, now - self.runs_out)
        self.runs_out = max(self.runs_out, now) + seconds
        self.seconds += seconds

    @property
    def gaps(self) -> float:
        """Seconds of all gaps when play began at `first`: how much earlier that was than the smooth start."""
        return self.smooth_start - self.first

    @property
    def stalled(self) -> bool:
        """Whether that listener has heard a gap."""
        return self.longest_gap > AUDIBLE_SECONDS
