"""Foresees when the rest of an answer's sound will be made, and so when its first sound may leave. Pure.

Under load the second piece of an answer may be made later than the first one has been heard, and the longest one later
than all before it. A listener who starts at once then hears a gap, and one who starts a little later hears none. How
much later that is follows from what the stage has to make before each of the pieces, in the order of `deadlines.py`,
from how fast it computes, and from how fast their input comes; what answers before have needed says what others that
begin later make of it. Without load nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from omni_actors.telemetry.playback import AUDIBLE_SECONDS, Playback

FIXED_SHARE = 0.45  # of a light step: what every step takes besides its pieces, on the host and an H200
MEMORY_SECONDS = 0.5  # of computing, after which a step's time counts a third
USUAL_SECONDS = 10.0  # the same, for what is usual
PHASE_SECONDS = 0.5  # for which what is slow now stays slow; the stages before are busy with an answer's beginning
LATE_WEIGHT = 0.1  # of a step, in the mean of what late steps had in them
PAUSE_SECONDS = 0.01  # between steps, from which on the stage had nothing to do
INPUT_MARGIN = 1.25  # of the time until a piece's input is foreseen to have come
QUEUE_MARGIN = 1.5  # of that for all pieces before it: those of answers that begin later come before it, too
HORIZON_SECONDS = 6.0  # of sound; pieces that are due later are not looked at
PROVEN_SECONDS = 1.5  # of an answer's sound; with less the pieces are small, and little is known
MOST = 0.9  # of the answers, which need no more than is foreseen for all
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


class Pace:
    """Seconds for a unit of something, of all of it together; what is longer ago counts less.

    Not the mean of ratios, in which what is slow and little would count as much as what is fast and much.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._seconds = self._units = 0.0

    def add(self, seconds: float, units: float) -> None:
        """Note that so many units took so long."""
        kept = math.exp(-seconds / self._memory)
        self._seconds, self._units = kept * self._seconds + seconds, kept * self._units + units

    @property
    def seconds(self) -> float:
        """For a unit; 0 if nothing is known."""
        return self._seconds / self._units if self._units else 0.0


def foreseen(units: float, now: float, usual: float) -> float:
    """Estimated seconds for `units`: at the current rate for the first 0.5 s, then at the long-run rate."""
    if units * now <= PHASE_SECONDS:
        return units * now
    return PHASE_SECONDS + (units - PHASE_SECONDS / now) * usual


@dataclass(slots=True)
class Arrivals:
    """How fast an answer's input comes: when tokens first and last came, and how many did by then. Seconds.

    `usual` is the pace of all answers.
    """

    usual: Pace = field(default_factory=lambda: Pace(USUAL_SECONDS))
    first: float = 0.0
    first_tokens: int = 0
    last: float = 0.0
    last_tokens: int = 0

    def add(self, now: float, tokens: int) -> None:
        """Note that there are so many tokens now."""
        if tokens > self.last_tokens:
            if self.last_tokens:
                self.usual.add(now - self.last, tokens - self.last_tokens)
            else:
                self.first, self.first_tokens = now, tokens
            self.last, self.last_tokens = now, tokens

    def foresee(self, tokens: int) -> float:
        """Seconds until so many more have come.

        The first tokens of an answer are slow because the stages before this one begin with it. So what is slow now
        becomes usual, and what is fast now stays so.
        """
        more, usual = self.last_tokens - self.first_tokens, self.usual.seconds
        now = (self.last - self.first) / more if more else usual
        return foreseen(tokens, now, min(now, usual))


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
        self._late, self._usual = Pace(MEMORY_SECONDS), Pace(USUAL_SECONDS)  # of a light step's pieces
        self._tokens = Pace(USUAL_SECONDS)  # of all answers' input
        self._share = 0.0  # of a light step, in a late one on average
        self._ended = 0.0
        self._largest = Ahead(0.0, 0.0, 1)
        self._seconds = 0.0  # of the sound of that one
        self._proven = False
        self._need, self._needed_by = 0.0, 0  # seconds that first sounds had to be kept, and of how many answers

    def arrivals(self) -> Arrivals:
        """Those of another answer's input."""
        return Arrivals(self._tokens)

    def stepped(self, share: float, began: float, ended: float) -> None:
        """Note a step, with pieces that together take this share of a light step."""
        # Without a pause the time between steps is theirs: that of the host.
        seconds = ended - (self._ended if began - self._ended < PAUSE_SECONDS else began)
        self._ended = ended
        self._share += LATE_WEIGHT * (share - self._share)
        for pace in (self._late, self._usual):
            pace.add(seconds, FIXED_SHARE + share)

    def completed(self, share: float, steps: int, seconds: float, made: float) -> None:
        """Record a finished chunk: its duration and the request's total audio so far.

        The largest pieces are those of which most sound consists.
        """
        self._proven |= made >= PROVEN_SECONDS
        if share >= self._largest.share:
            self._largest, self._seconds = Ahead(0.0, share, steps), seconds

    @property
    def listeners(self) -> int | None:
        """For how many listeners the stage makes sound as fast as they hear it, in full steps.

        0 until enough of an answer was made; `None` if pieces do not say what part of a step they take.
        """
        piece, unit = self._largest, self._usual.seconds
        if not (self._proven and unit):
            return 0
        if not piece.share:
            return None
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
        late, usual = self._late.seconds, self._usual.seconds
        step = self._share + FIXED_SHARE  # of those before
        under_way = step * usual
        work, steps = 0.0, 0
        for _, _, piece, answer in pieces:
            work += piece.share * piece.steps
            steps += piece.steps
            queue = foreseen(work + FIXED_SHARE * max(piece.steps, steps / self._places), late, usual)
            # The steps in which it is made have as much else in them as those before. Two others end first: the one
            # that the device computes, and the one that is queued behind it. The margin of the queue holds one of them.
            own = foreseen((piece.share + step) * (piece.steps + 2), late, usual)
            done = now + max(
                QUEUE_MARGIN * queue + under_way, INPUT_MARGIN * answer.arrivals.foresee(piece.missing) + own
            )
            answer.smooth_start = max(answer.smooth_start, done - piece.before)
        self._learn(answers)

    def _learn(self, answers: Sequence[Outlook]) -> None:
        """Use the 90th percentile of observed startup delays as the minimum for all requests.

        It applies while at least as many requests are concurrent as when it was observed.
        """
        needs = sorted(answer.made.gaps for answer in answers if answer.made.seconds > PROVEN_SECONDS)
        if needs:
            self._need, self._needed_by = needs[int(MOST * len(needs))], len(answers)
        if len(answers) >= MOST * self._needed_by:
            for answer in answers:
                answer.smooth_start = max(answer.smooth_start, answer.made.first + self._need)
