"""Made-up sentences: plain English by templates, lists of words, digits."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tools.speaker.numbers import DIGITS, in_words
from tools.speaker.wordnet import as_sentence

PEOPLE = (
    *(
        "the man",
        "the woman",
        "the boy",
        "the girl",
        "my brother",
        "my sister",
        "our teacher",
        "the doctor",
        "a farmer",
    ),
    *(
        "the old king",
        "my friend",
        "the captain",
        "her father",
        "his mother",
        "the baker",
        "a tired worker",
        "they",
        "we",
    ),
    *(
        "the children",
        "you",
        "she",
        "he",
        "I",
        "the neighbors",
        "a kind nurse",
        "the driver",
        "the painter",
        "our team",
    ),
)
VERBS = (
    *("found", "lost", "bought", "sold", "painted", "carried", "wanted", "saw", "needed", "kept", "moved", "broke"),
    *(
        "cleaned",
        "opened",
        "closed",
        "brought",
        "took",
        "built",
        "made",
        "forgot",
        "watched",
        "liked",
        "drew",
        "lifted",
    ),
    *("dropped", "washed", "fixed", "counted", "hid", "held"),
)
ADJECTIVES = (
    *("red", "blue", "green", "yellow", "black", "white", "brown", "small", "big", "old", "new", "heavy", "light"),
    *("wooden", "silver", "golden", "broken", "clean", "dirty", "warm", "cold", "empty", "full", "round", "square"),
    *(
        "strange",
        "beautiful",
        "simple",
        "quiet",
        "loud",
        "long",
        "short",
        "wet",
        "dry",
        "soft",
        "hard",
        "fresh",
        "dark",
    ),
)
THINGS = (
    *(
        "ball",
        "book",
        "chair",
        "table",
        "window",
        "door",
        "box",
        "bottle",
        "letter",
        "picture",
        "boat",
        "car",
        "bicycle",
    ),
    *(
        "guitar",
        "clock",
        "coin",
        "hat",
        "coat",
        "shoe",
        "cup",
        "plate",
        "knife",
        "spoon",
        "lamp",
        "basket",
        "bag",
        "key",
    ),
    *("stone", "flower", "tree", "apple", "orange", "blanket", "pillow", "ticket", "map", "camera", "radio", "piano"),
    *("bridge", "wall", "fence", "garden", "house", "castle", "wagon", "tractor", "engine", "shirt", "ring", "candle"),
    *("mirror", "carpet", "ladder", "hammer", "pencil", "newspaper", "sandwich"),
)
PLACES = (
    *("in the garden", "under the table", "near the river", "behind the house", "on the top shelf", "at the station"),
    *("in the kitchen", "by the sea", "on the hill", "across the street", "in the forest", "under the bridge"),
    *("at the market", "in the library", "on the roof", "beside the road", "in the city", "at school", "in the harbor"),
    *("next to the window", "on the floor", "inside the box", "at the airport", "in the museum", "around the corner"),
)
TIMES = (
    *("today", "yesterday", "this morning", "last night", "on Monday", "on Tuesday", "on Wednesday", "on Thursday"),
    *("on Friday", "on Saturday", "on Sunday", "in the evening", "before breakfast", "after lunch", "every day"),
    *("last week", "at noon", "in the spring", "in January", "in August", "in winter", "an hour ago", "at midnight"),
)
NATURE = (
    *("sea", "sky", "sun", "moon", "river", "wind", "rain", "snow", "forest", "road", "sand", "water", "mountain"),
    *(
        "city",
        "street",
        "morning",
        "evening",
        "house",
        "bread",
        "soup",
        "coffee",
        "bird",
        "dog",
        "cat",
        "horse",
        "fish",
    ),
    *("train", "ship", "music", "story", "answer", "question", "game", "weather", "ocean", "night"),
)
REQUESTS = ("bring", "give", "show", "send", "find", "take")


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
