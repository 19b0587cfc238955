"""What the thinker is to hear and see, and the texts that it then says."""

from __future__ import annotations

import random

from tools.speaker.corpus import Corpus
from tools.speaker.sentences import ADJECTIVES, DIGITS, THINGS, in_words
from tools.speaker.skills import COLORS, SHAPES

LISTS, SAID_LISTS = 12_800, 1500
WORDS = tuple(dict.fromkeys([*DIGITS, *COLORS, *ADJECTIVES, *THINGS]))


def heard_lists() -> list[list[str]]:
    """Returns what is spoken to the thinker: by turns one to five digits and one to four words."""
    rng, found = random.Random(17), []
    for number in range(LISTS):
        words, weights = (WORDS, (2, 3, 3, 2)) if number % 2 else (DIGITS, (2, 4, 2, 2, 2))
        count = rng.choices(range(1, len(weights) + 1), weights)[0]
        found.append([rng.choice(words) for _ in range(count)])
    return found


def spoken_line(words: list[str], number: int) -> str:
    """Returns what is given to the synthesiser: in half of the files, by twos, with pauses between the words."""
    return f"{(', ' if number // 2 % 2 else ' ').join(words)}."


def listed(words: list[str]) -> str:
    """Returns words as the thinker writes down what it hears."""
    return f"{', '.join(words).capitalize()}."


def sum_of(words: list[str]) -> str:
    """Returns the sum of two spoken digits; an empty text for other lists."""
    if len(words) != 2 or not set(words) <= set(DIGITS):
        return ""
    total = sum(DIGITS.index(word) for word in words)
    return f"{words[0]} plus {words[1]} is {in_words(total)}.".capitalize()


def seen_replies() -> list[str]:
    """Returns what is said of pictures: of each color and shape, then of each color, then of each shape."""
    both = [f"I see {'an' if color == 'orange' else 'a'} {color} {shape}." for color in COLORS for shape in SHAPES]
    return [*both, *(f"It is {color}." for color in COLORS), *(f"It is a {shape}." for shape in SHAPES)]


def said_texts(corpus: Corpus) -> tuple[list[str], int]:
    """Returns every text that the talker says, and how many are the corpus's own; what was heard or seen follows."""
    own = corpus.spoken_texts()
    known = set(own)
    more = [*seen_replies(), *(listed(words) for words in heard_lists()[1::2][:SAID_LISTS])]
    return [*own, *(text for text in dict.fromkeys(more) if text not in known)], len(own)
