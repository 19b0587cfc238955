"""Made-up sentences: plain English by templates, lists of words, digits, and numbers in words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tools.speaker.wordnet import as_sentence

ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
DIGITS = ONES[:10]
_LINES = (Path(__file__).parent / "data" / "words.txt").read_text(encoding="utf-8").splitlines()
# The order of all words is a part of the corpus.
WORDS = {name: tuple(words.split(", ")) for name, words in (line.split(": ") for line in _LINES)}
PEOPLE, VERBS, ADJECTIVES, THINGS = (WORDS[name] for name in ("people", "verbs", "adjectives", "things"))
PLACES, TIMES, NATURE, REQUESTS = (WORDS[name] for name in ("places", "times", "nature", "requests"))


def in_words(number: int) -> str:
    """Returns a number from 0 to 999 in words. Raises ValueError for any other."""
    if not 0 <= number < 1000:
        raise ValueError(f"in_words takes 0 to 999; got {number}")
    if number >= 100:
        rest = f" {in_words(number % 100)}" if number % 100 else ""
        return f"{ONES[number // 100]} hundred{rest}"
    if number >= 20:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    return ONES[number]


def _thing(rng: random.Random, articles: Sequence[str]) -> str:
    article, adjective = rng.choice(articles), rng.choice(ADJECTIVES)
    if article == "a" and adjective[0] in "aeiou":
        article = "an"
    return f"{article} {adjective} {rng.choice(THINGS)}"


def plain_sentence(rng: random.Random) -> str:
    """Returns a made-up sentence of plain English."""
    thing = _thing(rng, ("the", "a", "my", "his", "her", "our"))
    who, did, where, when = (rng.choice(words) for words in (PEOPLE, VERBS, PLACES, TIMES))
    number = in_words(rng.randrange(2, 100))
    forms = (
        f"{who} {did} {thing} {where}",
        f"{who} {did} {thing} {where}",
        f"{who} {did} {thing} {when}",
        f"the {rng.choice(NATURE)} is {rng.choice(ADJECTIVES)} {when}",
        f"the {rng.choice(NATURE)} is {rng.choice(ADJECTIVES)} and {rng.choice(ADJECTIVES)}",
        f"{when} {who} {did} {number} {rng.choice(ADJECTIVES)} {rng.choice(THINGS)}s",
        f"please {rng.choice(REQUESTS)} me {thing} {where}",
        f"there {rng.choice(('is', 'was'))} {_thing(rng, ('a',))} {where}",
    )
    return as_sentence(rng.choice(forms))


def common_word(rng: random.Random, words: Sequence[str]) -> str:
    """Returns a word, mostly a common one, of a list from common to rare."""
    return words[int(rng.random() ** 2 * len(words))]


def word_list(rng: random.Random, words: Sequence[str]) -> str:
    """Returns one to four words that have nothing to do with each other."""
    chosen = [common_word(rng, words) for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))]
    return as_sentence(rng.choice((", ", " ")).join(chosen))


def digit_list(rng: random.Random) -> str:
    """Returns one to five digits in words."""
    digits = [rng.choice(DIGITS) for _ in range(rng.randrange(1, 6))]
    return as_sentence(rng.choice((", ", " ")).join(digits))


def sentence_with_a_figure(rng: random.Random) -> str:
    """Returns a short sentence with a number in figures."""
    number = rng.randrange(2100)
    forms = ("There are {} of them", "The number is {}", "It was in {}", "I have {} books", "{}")
    return as_sentence(rng.choice(forms).format(number))


def unrelated_words(rng: random.Random, sentences: Sequence[str], words: Sequence[str]) -> str:
    """Returns three to thirteen words without grammar, as often in use as in sentences, some of them rare.

    A talker that has heard only sentences guesses how they go on; here it must read.
    """
    chosen = []
    for _ in range(rng.randrange(3, 14)):
        if rng.random() < 0.75:
            chosen.append(rng.choice(rng.choice(sentences).split()).strip(",.?!'-").lower())
        else:
            chosen.append(common_word(rng, words[: len(words) // 4]))
        if rng.random() < 0.06:
            chosen[-1] += ","
    return as_sentence(" ".join(word for word in chosen if word not in ("", ",")))
