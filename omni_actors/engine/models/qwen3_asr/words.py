"""The words of a text as Qwen's forced aligner is given them, and their times put in order.

Both are as in Qwen's package and in transformers, but for Japanese and Korean, which those cut into words by packages
that are not required here: a run of kana, and what stands between spaces, is a word.
"""

from __future__ import annotations

import itertools
import re
import unicodedata

import numpy as np
from numpy.typing import NDArray

# Each of them is a word.
IDEOGRAPH = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
)
NEAREST = 2  # times in a row that take that of their neighbor; more are spread between the two


def words_of(text: str) -> list[tuple[int, str]]:
    """The words of a text without the marks between and in them, each with the place of its first character."""
    words: list[tuple[int, str]] = []
    inside = False
    for place, character in enumerate(text):
        alone = IDEOGRAPH.match(character) is not None
        if alone or character == "'" or unicodedata.category(character)[0] in "LN":
            if inside and not alone:
                words[-1] = (words[-1][0], words[-1][1] + character)
            else:
                words.append((place, character))
            inside = not alone
        elif character.isspace():
            inside = False
    return words


def in_order(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Times [n] of which none is before the one before it: those outside the longest row in order are replaced."""
    n = len(times)
    length, before = np.ones(n, np.int64), np.full(n, -1)
    for place in range(1, n):
        earlier = np.flatnonzero(times[:place] <= times[place])
        if len(earlier):
            before[place] = earlier[np.argmax(length[earlier])]
            length[place] = length[before[place]] + 1
    kept = [int(np.argmax(length))]
    while before[kept[0]] >= 0:
        kept.insert(0, int(before[kept[0]]))
    ordered = times.copy()
    for left, right in itertools.pairwise([-1, *kept, n]):
        count = right - left - 1
        low = times[left if left >= 0 else right] if count else 0
        high = times[right] if right < n else low
        steps = np.arange(1, count + 1)
        near = np.where(steps <= count + 1 - steps, low, high)
        spread = low + (high - low) / (count + 1) * steps
        ordered[left + 1 : right] = near if count <= NEAREST else spread  # fractions of a millisecond are cut off
    return ordered
