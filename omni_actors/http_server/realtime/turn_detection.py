"""Finds where the user begins to speak and stops, from the probability of speech in each window of sound."""

from __future__ import annotations

from typing import NamedTuple

from omni_actors.http_server.realtime.session_config import RATE, ServerVad

BEGIN_WINDOWS = 2  # that must be speech before a turn begins, so that a click is none
HYSTERESIS = 0.15  # by which the probability must fall below the threshold to count as silence


class Window(NamedTuple):
    """A stretch of the session's sound, in samples, and the probability that it is speech."""

    start: int
    end: int
    probability: float


class TurnBegins(NamedTuple):
    """The user speaks; `start` includes the padding."""

    start: int


class TurnEnds(NamedTuple):
    """The user has stopped; `end` includes the silence that showed it, `silence` is its length in samples."""

    end: int
    silence: int


class TurnDetector:
    """The state of one session's turn."""

    def __init__(self, config: ServerVad) -> None:
        self._config = config
        self._padding = self._samples(config.prefix_padding_ms)
        self._speech_windows = 0
        self._speech_start = 0
        self._speech_end = 0
        self.speaking = False

    def feed(self, window: Window) -> TurnBegins | TurnEnds | None:
        """Take the next window."""
        if window.probability >= self._config.threshold:
            if not self._speech_windows:
                self._speech_start = window.start
            self._speech_windows += 1
            self._speech_end = window.end
            if not self.speaking and self._speech_windows >= BEGIN_WINDOWS:
                self.speaking = True
                return TurnBegins(self.needed_from(window.end))
            return None
        if not self.speaking:
            self._speech_windows = 0
            return None
        if window.probability >= self._config.threshold - HYSTERESIS:
            self._speech_end = window.end
        silence = window.end - self._speech_end
        if silence < self._samples(self._config.silence_duration_ms):
            return None
        self.reset()
        return TurnEnds(window.end, silence)

    def reset(self) -> None:
        """Forget the turn, as when its sound was committed or discarded."""
        self.speaking = False
        self._speech_windows = 0

    def needed_from(self, end: int) -> int:
        """Position of the first sample that a turn may need after the sound until `end`."""
        begun = self._speech_start if self._speech_windows else end
        return max(begun - self._padding, 0)

    @staticmethod
    def _samples(milliseconds: int) -> int:
        return milliseconds * RATE // 1000
