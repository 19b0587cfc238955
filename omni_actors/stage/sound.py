"""When sound is made and sent: whose comes next, and when a first sound may leave.

One rule stands behind all of it: every chunk of sound has a moment at which its listener runs dry.

* **Order** (`choose`). Chunks are served in the order of their requests' priority and, among equals, of these moments;
  a first chunk is due a moment after its input came. While one of them is due soon, those that are not may only fill a
  step that stays light, because every chunk makes a step longer. None starves: a due time is fixed, and those of new
  ones lie ever later.
* **Start** (`foresee`). A first sound leaves once all chunks of the next seconds can be made before they are heard, as
  far as the pace of its input, its own steps and the work that is due before it tell. Alone, it leaves at once.
* **Room** (`Costs.listeners`). Sound of another answer is begun only while the stage makes the sound of those that are
  running faster than they hear it.

Pictures are in the same order. One is due when it has taken `STRETCH` times as long as it would alone: of those that
came together the smallest goes first, and a large one, which takes seconds, yields to small ones until it is overdue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from omni_actors.telemetry.request_log import AUDIBLE_SECONDS, Playback

FIRST_SECONDS = 0.25  # from the first input of an answer to when its first sound is due
PRESSING_SECONDS = 0.3  # a chunk that is due this soon keeps a step light

# What one H200 computes of a transformer with 6 billion parameters: 31,000 in pictures of 2048 x 2048 pixels, 43,000 in
# those of 1024 x 1024, 49,000 in those of 512 x 512. On a slower device the order is closer to that of arrival, on a
# faster one the small ones pass more of the others.
TOKENS_PER_SECOND = 40_000.0
STRETCH = 4.0
LONG_STEP_TOKENS = 8192  # a step of more takes a quarter of a second; behind it, no other is queued

KeyT = TypeVar("KeyT")


def picture_due(arrived: float, tokens: int) -> float:
    """When a picture is due, by its arrival (seconds) and the tokens of all its steps together.

    What has been computed of it does not count. Otherwise a large picture would pass all small ones once half of it is
    made, and they would wait for seconds.
    """
    return arrived + STRETCH * tokens / TOKENS_PER_SECOND


class Piece(Struct, Generic[KeyT], frozen=True):
    """The next piece of an answer's sound.

    Args:
        key: what the caller knows it by.
        priority: of its request; lower values go first.
        due: when its listener falls silent, in seconds by the stage's monotonic clock.
        share: the part that it takes of a light step; all the pieces of such a step take at most 1.
    """

    key: KeyT
    priority: int
    due: float
    share: float = 0.0


def choose(
    pieces: Iterable[Piece[KeyT]], now: float, places: int, fits: Callable[[KeyT], bool] = lambda _: True
) -> list[KeyT]:
    """Return the keys of the pieces in the next step, in order of precedence; equals keep the order of `pieces`.

    Args:
        pieces: all that could be in it.
        places: the most pieces that a step takes.
        fits: asked in order of precedence, and never again in a step; a piece that does not fit is passed over.
    """
    chosen: list[KeyT] = []
    share, pressed = 0.0, False
    for piece in sorted(pieces, key=lambda piece: (piece.priority, piece.due)):
        presses = piece.due < now + PRESSING_SECONDS
        if len(chosen) >= places or (pressed and not presses and share + piece.share > 1):
            break
        if fits(piece.key):
            chosen.append(piece.key)
            share += piece.share
            pressed |= presses
    return chosen


FIXED_SHARE = 0.45  # of a light step: what every step costs besides its chunks
MEMORY_SECONDS = 1.0  # of computing, after which what a step cost counts a third
PAUSE_SECONDS = 0.01  # between steps, from which on the stage had nothing to do
ROOM = 1.2  # times as fast as it is heard the sound of all running answers is to be made
HORIZON_SECONDS = 2.0  # of sound; chunks that are due later are not looked at
WORK_MARGIN = 1.5  # of that for all work that is due before: chunks of answers that begin later come before it, too
LONGEST_SECONDS = 5.0  # to keep sound
CHUNKS_AHEAD = 6  # of an answer that are looked at


class Ahead(Struct, frozen=True):
    """A chunk that is to be made.

    Args:
        before: seconds of the answer's sound before it.
        share: the part that it takes of a light step; 0 if its model has none.
        steps: that it has to be in.
        missing: tokens of its input that are not there yet.
    """

    before: float
    share: float
    steps: int
    missing: int = 0


class Costs:
    """What the steps of a stage have cost lately. Moments are in seconds, all by one clock.

    Args:
        places: the most chunks that a step takes.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._seconds = self._work = self._steps = 0.0  # what is longer ago counts less
        self._ended = 0.0
        self._largest, self._sound = Ahead(0.0, 0.0, 1), 0.0  # and the seconds of its sound

    def work(self, share: float) -> float:
        """The work of a chunk in one step, in light steps."""
        return share or 1 / self._places

    def stepped(self, shares: Sequence[float], began: float, ended: float) -> None:
        """Note a step with chunks that take these shares of a light one."""
        # Without a pause the time between steps is theirs: that of the host.
        seconds = ended - (self._ended if began - self._ended < PAUSE_SECONDS else began)
        self._ended = ended
        kept = math.exp(-seconds / MEMORY_SECONDS)
        self._seconds = kept * self._seconds + seconds
        self._work = kept * self._work + sum(map(self.work, shares))
        self._steps = kept * self._steps + 1

    def completed(self, share: float, steps: int, seconds: float) -> None:
        """Note how long the sound of a finished chunk is. Most sound is in the largest ones."""
        if self.work(share) >= self.work(self._largest.share) or not self._sound:
            self._largest, self._sound = Ahead(0.0, share, steps), seconds

    @property
    def unit(self) -> float:
        """Seconds for the work of a light step, in steps like the last ones."""
        return self._seconds / self._work if self._work else 0.0

    @property
    def step(self) -> float:
        """Seconds for a step."""
        return self._seconds / self._steps if self._steps else 0.0

    @property
    def listeners(self) -> float:
        """For how many listeners the stage makes sound `ROOM` times as fast as they hear it, in full steps."""
        if not (self._sound and self._seconds):
            return math.inf
        full = FIXED_SHARE + self._places * self.work(self._largest.share)
        seconds = self._seconds / (self._work + FIXED_SHARE * self._steps) * full * self._largest.steps
        return max(1.0, self._places * self._sound / (seconds * ROOM))


class Arrivals(Struct):
    """How an answer's input comes: when tokens first and last came, and how many did by then. Seconds."""

    first: float = 0.0
    first_tokens: int = 0
    last: float = 0.0
    last_tokens: int = 0

    def add(self, now: float, tokens: int) -> None:
        """Record the number of tokens that have arrived by now."""
        if tokens > self.last_tokens:
            if not self.last_tokens:
                self.first, self.first_tokens = now, tokens
            self.last, self.last_tokens = now, tokens

    def pace(self, usual: float) -> float:
        """Seconds for a token; `usual` while none has come after the first ones."""
        more = self.last_tokens - self.first_tokens
        return (self.last - self.first) / more if more else usual


class Outlook(Struct):
    """An answer: what was made of it, when its next chunk is due, seconds for a token of its input, all chunks to come.

    `smooth_start` is the result: when a listener can start and hear no gap, as far as is foreseen.
    """

    made: Playback
    due: float
    pace: float
    ahead: Sequence[Ahead]
    smooth_start: float = 0.0

    @property
    def leaves(self) -> float:
        """When its first sound may leave."""
        wait = self.smooth_start - self.made.first
        return self.made.first + (min(wait, LONGEST_SECONDS) if wait > AUDIBLE_SECONDS else 0.0)


def foresee(answers: Sequence[Outlook], costs: Costs, now: float) -> None:
    """Foresee the smooth starts of all answers of a stage."""
    chunks = []
    for answer in answers:
        answer.smooth_start = answer.made.smooth_start
        for chunk in answer.ahead:
            later = chunk.before - answer.made.seconds
            if later > HORIZON_SECONDS:
                break
            chunks.append((max(answer.due, now) + later, chunk, answer))
    chunks.sort(key=lambda entry: entry[0])
    work = 0.0
    for _, chunk, answer in chunks:
        work += costs.work(chunk.share) * chunk.steps
        own = chunk.missing * answer.pace + (chunk.steps + 1) * costs.step  # one step is under way
        answer.smooth_start = max(answer.smooth_start, now + max(WORK_MARGIN * work * costs.unit, own) - chunk.before)
