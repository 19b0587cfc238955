"""Foresees when the rest of an answer's sound will be made, and so when its first sound may leave. Pure.

Under load the second piece of an answer may be made later than the first one has been heard, and the longest one later
than all before it. A listener who starts at once then hears a gap, and one who starts a little later hears none. How
much later that is follows from what the stage has to make before each of the pieces, in the order of `deadlines.py`,
from how fast it computes, and from how fast their input comes. Without load nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from omni_actors.telemetry.playback import AUDIBLE_SECONDS, Playback

FIXED_SHARE = 0.42  # of a light step: what every step takes besides its pieces (3 of 10 ms on an H200)
MEMORY_SECONDS = 0.5  # of computing, after which a step's time counts a third
USUAL_SECONDS = 15.0  # the same, for what is usual
PAUSE_SECONDS = 0.01  # between steps, from which on the stage had nothing to do
MARGIN = 1.25  # of what is foreseen
HORIZON_SECONDS = 6.0  # of sound; pieces that are due later are not looked at
LONGEST_SECONDS = 5.0  # to keep sound
PIECES_AHEAD = 6  # of an answer that are looked at


@dataclass(frozen=True, slots=True)
class Ahead:
    """A piece of an answer's sound that is to be made.

    Args:
        before: seconds of the answer's sound before it.
        share: the part that it takes of a light step.
        steps: that it has to be in.
        missing: tokens of its input that are not there yet.
    """

    before: float
    share: float
    steps: int
    missing: int = 0


@dataclass(slots=True)
class Arrivals:
    """How fast an answer's input comes: when tokens first and last came, and how many did by then. Seconds."""

    first: float = 0.0
    first_tokens: int = 0
    last: float = 0.0
    last_tokens: int = 0

    def add(self, now: float, tokens: int) -> None:
        """Note that there are so many tokens now."""
        if not self.last_tokens:
            self.first, self.first_tokens = now, tokens
        if tokens > self.last_tokens:
            self.last, self.last_tokens = now, tokens

    @property
    def seconds_per_token(self) -> float | None:
        """None if all came at once."""
        more = self.last_tokens - self.first_tokens
        return (self.last - self.first) / more if more else None


@dataclass(slots=True)
class Outlook:
    """An answer: what was made of it, when its next piece is due, how its input comes, and all pieces to come.

    `smooth_start` is the result: when a listener can start and hear no gap, as far as is foreseen.
    """

    made: Playback
    due: float
    arrivals: Arrivals
    ahead: Sequence[Ahead]
    smooth_start: float = field(default=0.0)

    def leaves(self) -> float:
        """When its first sound may leave."""
        wait = self.smooth_start - self.made.first
        return self.made.first + (min(wait, LONGEST_SECONDS) if wait > AUDIBLE_SECONDS else 0.0)


class Forecast:
    """Follows how fast a stage computes, and foresees smooth starts. Moments are in seconds, all by one clock.

    Args:
        places: the most pieces that a step takes.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._unit = 0.0  # seconds that a light step takes, without what every step takes
        self._usual = 0.0  # the same over a longer time
        self._ended = 0.0
        self._largest = Ahead(0.0, 0.0, 1)
        self._seconds = 0.0  # of the sound of that one

    def stepped(self, share: float, began: float, ended: float) -> None:
        """Note a step, with pieces that together take this share of a light step."""
        # Without a pause the time between steps is theirs: that of the host.
        seconds = ended - (self._ended if began - self._ended < PAUSE_SECONDS else began)
        self._ended = ended
        unit = seconds / (FIXED_SHARE + share)
        if not self._unit:
            self._unit = self._usual = unit
        self._unit += min(1.0, seconds / MEMORY_SECONDS) * (unit - self._unit)
        self._usual += min(1.0, seconds / USUAL_SECONDS) * (unit - self._usual)

    def completed(self, share: float, steps: int, seconds: float) -> None:
        """Note a piece of so many seconds of sound; the largest ones are those of which most sound consists."""
        if share >= self._largest.share:
            self._largest, self._seconds = Ahead(0.0, share, steps), seconds

    @property
    def listeners(self) -> int:
        """For how many listeners the stage makes sound as fast as they hear it, in full steps; 0 if that is unknown.

        What it makes when nothing else is left to do on the device is more than it makes usually.
        """
        piece, unit = self._largest, max(self._unit, self._usual)
        if not piece.share or not unit:
            return 0
        step = unit * (FIXED_SHARE + self._places * piece.share)
        return max(1, int(self._places * self._seconds / (piece.steps * step)))

    def look(self, answers: Sequence[Outlook], now: float) -> None:
        """Foresee the smooth starts of all answers of the stage."""
        pieces = []
        for answer in answers:
            answer.smooth_start = answer.made.smooth_start
            for piece in answer.ahead:
                later = piece.before - answer.made.seconds
                if later > HORIZON_SECONDS:
                    break
                pieces.append((max(answer.due, now) + later, answer.due, piece, answer))
        pieces.sort(key=lambda entry: entry[:2])
        pace = _slowest(answer.arrivals for answer in answers)
        others = sum(_largest(answer.ahead) for answer in answers)
        work, steps = 0.0, 0
        for _, _, piece, answer in pieces:
            work += piece.share * piece.steps
            steps += piece.steps
            queue = self._unit * (work + FIXED_SHARE * max(piece.steps, steps / self._places))
            # Of an answer one piece at a time is made, so the others' pieces are what can make its steps longer.
            crowd = min(1.0, piece.share + others - _largest(answer.ahead))
            own = self._unit * (crowd + FIXED_SHARE) * (piece.steps + 1)
            per_token = answer.arrivals.seconds_per_token
            arrival = piece.missing * (pace if per_token is None else per_token)
            done = now + max(MARGIN * queue, MARGIN * arrival + own)
            answer.smooth_start = max(answer.smooth_start, done - piece.before)


def _slowest(arrivals: Iterable[Arrivals]) -> float:
    """Seconds per token of the answer whose input comes most slowly; 0 if none is known."""
    return max((pace for each in arrivals if (pace := each.seconds_per_token) is not None), default=0.0)


def _largest(pieces: Sequence[Ahead]) -> float:
    """The largest share of a light step that one of the pieces takes."""
    return max((piece.share for piece in pieces), default=0.0)
