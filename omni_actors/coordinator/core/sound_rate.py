"""How many answers can be spoken at a time, learnt from the sound that they get. Pure: moments are arguments.

A listener needs a second of sound per second from the first piece on. What the answers that run
get says how many may run at `pace` times that. One more may begin when all of them are heard and get that much, and
when they get less, the number falls to what is measured.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass

WINDOW_SECONDS = 1.5  # what is measured is this old at most
SLICE_SECONDS = 0.25  # after which it is looked at again
PROVEN_SECONDS = 1.0  # of listening, after which too little sound is no accident of how it is cut into pieces
SLICE_SOUND = 5.0  # or so many seconds of sound
GAIN = 0.2  # of a small difference that is taken over at a look; a large rise is at once
LARGE = 1.5
ALONE = 1.5  # listeners, on average: hardly more than one
UNLIMITED = 1_000_000
MEMORY = 0.95  # of answers that have ended, for each that ends
LEAST_PART = 0.02
UNKNOWN = 0.5  # listeners that answers whose sound has not begun may add, beyond what was measured


@dataclass
class _Answer:
    """Moments: when it was begun, and when its first piece came, if it has."""

    begun: float
    heard: float | None = None


@dataclass
class _Slice:
    """A stretch of time in which there were listeners; seconds."""

    ended: float = 0.0
    heard: float = 0.0  # with at least one listener
    needed: float = 0.0  # the same, of all listeners together
    sound: float = 0.0  # that they got, but for their first pieces
    begun: bool = False  # whether an answer began


class SoundRate:
    """Follows the answers that are spoken, and says in `places` how many there may be."""

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._answers: dict[str, _Answer] = {}
        self._listeners = 0
        self._lives = self._heard = 0.0  # seconds of answers that have ended: from begin to end, and with a listener
        self._last = 0.0
        self._slices: collections.deque[_Slice] = collections.deque()
        self._slice = _Slice()
        self._limit = 1.0
        self._full = False  # those who listen would get less than they should if they were one more
        self._hopeless = False  # not even one answer alone is made as fast as it is heard

    @property
    def places(self) -> int:
        """How many answers may be spoken at a time."""
        return UNLIMITED if self._hopeless else max(1, int(self._limit))

    def begin(self, request_id: str, now: float) -> None:
        """An answer may be spoken from now on."""
        self.advance(now)
        self._answers[request_id] = _Answer(now)
        self._slice.begun = True

    def sound(self, request_id: str, seconds: float, now: float) -> None:
        """A piece of its sound came. The first one starts its need; how long it took to come says nothing of it."""
        self.advance(now)
        answer = self._answers.get(request_id)
        if answer is None:
            return
        if answer.heard is not None:
            self._slice.sound += seconds
        else:
            answer.heard = now
            self._listeners += 1

    def end(self, request_id: str, now: float) -> None:
        """All of its sound is there, or it has ended. Idempotent."""
        self.advance(now)
        answer = self._answers.pop(request_id, None)
        if answer is None or answer.heard is None:
            return
        self._listeners -= 1
        self._lives = MEMORY * self._lives + now - answer.begun
        self._heard = MEMORY * self._heard + now - answer.heard

    def probe(self, now: float) -> bool:
        """Whether one more answer may begin than was measured.

        All that run get what they need as far as that is known: their sound has begun, or it would hardly be a need.
        """
        self.advance(now)
        unheard = len(self._answers) - self._listeners
        return not self._full and unheard * self._part < UNKNOWN

    def advance(self, now: float) -> None:
        """Let time pass. Call it a few times a second."""
        passed, self._last = max(0.0, now - self._last), now
        if self._listeners:
            self._slice.heard += passed
            self._slice.needed += passed * self._listeners
        if self._slice.heard >= SLICE_SECONDS or self._slice.sound >= SLICE_SOUND:
            self._slice.ended = now
            self._slices.append(self._slice)
            self._look(begun=self._slice.begun)
            self._slice = _Slice()
        while self._slices and self._slices[0].ended < now - WINDOW_SECONDS:
            self._slices.popleft()
            self._full = self._full and bool(self._slices)  # with no measure, nothing is known

    @property
    def _part(self) -> float:
        """The part of its time in which an answer has a listener: a small one if it is short, or made as a whole."""
        return max(LEAST_PART, self._heard / self._lives) if self._lives else 1.0

    def _look(self, begun: bool) -> None:
        """Learn from the last slices. What answers get while no others begin is more than they get next to those."""
        heard = sum(slice.heard for slice in self._slices)
        needed = sum(slice.needed for slice in self._slices)
        sound = sum(slice.sound for slice in self._slices)
        places = sound / heard / self._pace / self._part
        proven = needed >= PROVEN_SECONDS
        self._full = proven and sound < (needed + heard) * self._pace
        if places > self._limit and begun:
            self._limit = places if places > LARGE * self._limit else self._limit + GAIN * (places - self._limit)
        elif proven and sound < needed * self._pace:
            self._limit = max(1.0, self._limit + GAIN * (places - self._limit))
        if sound >= needed:
            self._hopeless = False
        elif proven and needed <= ALONE * heard:
            self._hopeless = True
