"""Learns for how long to keep an answer's first sound, so that the rest of it follows without a gap. Pure.

Under load the second piece of an answer may be made later than the first one has been heard. A listener who starts at
once then hears a gap, and one who starts a little later hears none. How much later that is, the last answers tell: as
late as their smooth starts were after their first pieces. Without load they need nothing, and nothing is kept.
"""

from __future__ import annotations

from collections import deque

from omni_actors.telemetry.playback import AUDIBLE_SECONDS, Playback

WINDOW_SECONDS = 5.0  # answers that began longer ago say nothing about the load of now
LONGEST_SECONDS = 2.0  # to keep sound; answers that need more have gaps, but shorter ones
KEPT_ANSWERS = 1024
EXCEPTIONS = 50  # one answer in so many does not count, and one more: a client that reads slowly must not delay others


class Lead:
    """What the answers of the last seconds needed. Moments are in seconds, all by one clock."""

    def __init__(self) -> None:
        self._answers: deque[Playback] = deque(maxlen=KEPT_ANSWERS)

    def begin(self, made: Playback) -> float:
        """Note an answer whose first piece has just been made; return for how many seconds to keep it.

        Args:
            made: when its pieces were made. The caller goes on to add pieces to it.
        """
        while self._answers and self._answers[0].first < made.first - WINDOW_SECONDS:
            self._answers.popleft()
        needs = sorted(answer.gaps for answer in self._answers)
        exceptions = 1 + len(needs) // EXCEPTIONS
        self._answers.append(made)
        need = needs[-1 - exceptions] if len(needs) > exceptions else 0.0
        return min(need, LONGEST_SECONDS) if need > AUDIBLE_SECONDS else 0.0
