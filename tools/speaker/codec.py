"""The codec: 50 codes a second, each a phone, the third of it, whether a word begins with it, and the pitch.

Code 0 is the vocoder's "no code" of classifier-free guidance. Only a synthesiser's speech can be encoded, because the
phones and where they end must be known. The numbers are a part of the trained weights: never change their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int64]

PHONES = (
    *("pau", "aa", "ae", "ah", "ao", "aw", "ax", "ay", "b", "ch", "d", "dh", "eh", "er", "ey", "f", "g", "hh", "ih"),
    *("iy", "jh", "k", "l", "m", "n", "ng", "ow", "oy", "p", "r", "s", "sh", "t", "th", "uh", "uw", "v", "w", "y"),
    *("z", "zh", "axr"),
)
UNVOICED = frozenset({"pau", "ch", "f", "hh", "k", "p", "s", "sh", "t", "th"})
THIRDS = 3
PITCH_LEVELS = 6  # 0: no pitch; 1 to 5: from low to high
CODE_MS = 20
PITCH_FRAME_MS = 5
LEAD_MS, TAIL_MS = 60, 120  # this much of the silence at either end is kept
VOICED_HZ = 30.0
FEWEST_PHONES = 3  # two of them are silence


@dataclass(frozen=True)
class Voice:
    """A voice of the checkpoint."""

    name: str  # as published
    teacher: str  # flite's name for the voice that it learns from
    mean_hz: float  # the teacher's usual pitch
    edges: tuple[float, float, float, float]  # between pitch levels 1 to 5, in semitones from `mean_hz`
    stretch: float  # factor of the teacher's durations


VOICES = {
    "Chelsie": Voice("Chelsie", "slt", 174.0, (-1.0, -0.35, 0.3, 1.2), 1.0),
    "Ethan": Voice("Ethan", "rms", 97.0, (-2.0, -0.2, 1.0, 2.4), 0.9),  # rms speaks slowly
}


@dataclass(frozen=True)
class Utterance:
    """What the teacher says about one text."""

    phones: Codes  # of each phone the index in `PHONES`
    word_starts: npt.NDArray[np.bool_]  # whether a word begins with it
    ends_ms: Codes  # where it ends
    pitch_hz: npt.NDArray[np.float64]  # one value for each 5 ms, 0 where there is none
    samples: npt.NDArray[np.int16]  # at 16 kHz; empty unless the wave was asked for


@dataclass(frozen=True)
class Sound:
    """The meaning of one code: `phone` and `third` as indices, `pitch` as a level."""

    phone: int
    third: int
    word_start: bool
    pitch: int


def _sounds() -> list[Sound]:
    """Returns the meaning of every code from 1 on; a word starts in a phone's first third only."""
    found = []
    for phone, name in enumerate(PHONES):
        levels = 1 if name in UNVOICED else PITCH_LEVELS
        for third in range(THIRDS):
            starts = (False, True) if third == 0 and name != "pau" else (False,)
            found += [Sound(phone, third, start, level) for start in starts for level in range(levels)]
    return found


SOUNDS = _sounds()
CODES = len(SOUNDS) + 1  # with code 0
_NUMBER = {sound: number for number, sound in enumerate(SOUNDS, 1)}


def encode(utterance: Utterance, voice: Voice) -> tuple[Codes, int]:
    """Returns the codes of an utterance, and at which millisecond of it they begin; none of silence alone."""
    if len(utterance.phones) < FEWEST_PHONES:
        return np.zeros(0, np.int64), 0
    ends = utterance.ends_ms
    first, last = 0, int(ends[-1])
    if utterance.phones[0] == 0:
        first = max(0, int(ends[0]) - LEAD_MS) // PITCH_FRAME_MS * PITCH_FRAME_MS
    if utterance.phones[-1] == 0 and len(ends) > 1:
        last = min(last, int(ends[-2]) + TAIL_MS)
    middles = first + CODE_MS * np.arange(max(1, (last - first) // CODE_MS)) + CODE_MS // 2
    which = np.minimum(np.searchsorted(ends, middles, side="right"), len(ends) - 1)
    codes = np.empty(len(middles), np.int64)
    levels = _pitch_levels(utterance.pitch_hz, middles, voice)
    for place, (index, third, level) in enumerate(zip(which, _thirds(which), levels, strict=True)):
        phone = int(utterance.phones[index])
        start = bool(utterance.word_starts[index]) and third == 0 and phone != 0
        pitch = 0 if PHONES[phone] in UNVOICED else int(level)
        codes[place] = _NUMBER[Sound(phone, int(third), start, pitch)]
    return codes, first


def _thirds(which: Codes) -> Codes:
    """Returns the third of its phone in which each code lies, so that every phone begins with third 0."""
    changes = np.flatnonzero(np.diff(which, prepend=which[0] - 1))
    sizes = np.diff(np.append(changes, len(which)))
    inside = np.arange(len(which)) - np.repeat(changes, sizes)
    return np.asarray(THIRDS * inside // np.maximum(np.repeat(sizes, sizes), THIRDS), np.int64)


def _pitch_levels(pitch: npt.NDArray[np.float64], middles: Codes, voice: Voice) -> Codes:
    """Returns the level of the mean pitch of the four frames around each point; 0 unless two of them have a pitch."""
    frames = (middles[:, None] + np.array([-8, -3, 2, 7])) // PITCH_FRAME_MS
    around = pitch[np.clip(frames, 0, len(pitch) - 1)]
    voiced = around > VOICED_HZ
    count = voiced.sum(1)
    mean = np.where(voiced, around, 0).sum(1) / np.maximum(count, 1)
    semitones = 12 * np.log2(np.where(count >= 2, mean, voice.mean_hz) / voice.mean_hz)
    return np.where(count >= 2, 1 + np.searchsorted(voice.edges, semitones), 0)
