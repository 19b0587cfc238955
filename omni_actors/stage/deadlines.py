"""Decides whose sound a stage makes next: that of the listeners who fall silent first. Pure.

A piece of sound is due when its listener has heard everything before it; a first piece is due a moment after its input
came. Pieces are served in the order of their requests' priority and, among equals, of when they are due. While one of
them is due soon, those that are not may only fill a step that stays light, because every chunk makes a step longer.

None starves: a piece's due time is fixed, and those of new ones lie ever later.

Pictures are in the same order. One is due when it has taken `STRETCH` times as long as it would alone: of those that
came together the smallest goes first, and a large one, which takes seconds, yields to small ones until it is overdue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

FIRST_SECONDS = 0.25  # from the first input of an answer to when its first sound is due
HEARD_SECONDS = 0.4  # priority bonus in seconds for requests whose playback has started
PRESSING_SECONDS = 0.3  # a piece that is due this soon keeps a step light

LATE_SECONDS = 0.05  # before a piece is due, from which on other stages leave the device to this one
INPUT_SECONDS = 0.2  # before a piece is due whose input is missing, from which on the stages that make it do not

# What one H200 computes of a transformer with 6 billion parameters: 31,000 in pictures of 2048 x 2048 pixels, 43,000 in
# those of 1024 x 1024, 49,000 in those of 512 x 512. On a slower device the order is closer to that of arrival, on a
# faster one the small ones pass more of the others.
TOKENS_PER_SECOND = 40_000.0
STRETCH = 4.0
LONG_STEP_TOKENS = 8192  # a step of more takes a quarter of a second; behind it, no other is queued

KeyT = TypeVar("KeyT")


def picture_due(arrived: float, tokens: int) -> float:
    """When a picture is due that arrived then (seconds) and has so many tokens in all of its steps together.

    What has been computed of it does not count. Otherwise a large picture would pass all small ones once half of it is
    made, and they would wait for seconds.
    """
    return arrived + STRETCH * tokens / TOKENS_PER_SECOND


@dataclass(frozen=True, slots=True)
class Piece(Generic[KeyT]):
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


def needs_device(able: Iterable[float], waiting: Iterable[float], now: float) -> bool:
    """Whether the stages before this one shall leave the device to it, because a listener falls silent.

    Not while a listener who soon does so lacks the very input that they make.

    Args:
        able: when the pieces are due that could be made at once.
        waiting: when those are due that lack input.
    """
    late = min(able, default=math.inf) < now + LATE_SECONDS
    return late and min(waiting, default=math.inf) > now + INPUT_SECONDS
