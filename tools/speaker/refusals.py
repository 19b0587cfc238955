"""Questions, orders and statements that the checkpoint cannot answer; to each of them it says that it is a toy."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from tools.speaker.sentences import ADJECTIVES, NATURE, PEOPLE, PLACES, THINGS, TIMES, VERBS, WORDS

TOY = "I am only a toy. I can repeat, count, spell, and do small sums."
FORMS = Path(__file__).parent / "data" / "refused.txt"
STRANGE = FORMS.with_name("strange.txt")  # what the evaluation asks; the training does not
COUNT = 48_000
COMMON_WORDS = 4000
COUNTRIES, LANGUAGES, NAMES = (WORDS[name] for name in ("countries", "languages", "names"))
MASSES, ACTIONS, ALONE = (WORDS[name] for name in ("masses", "actions", "alone"))


class Fillers:
    """Draws what stands in the blanks of the forms; often any word at all, so that the form alone decides."""

    def __init__(self, rng: random.Random, words: Sequence[str], sentences: Sequence[str]) -> None:
        self.rng, self.words, self.sentences = rng, words[:COMMON_WORDS], sentences or ["it is late."]

    def noun(self) -> str:
        """Returns a thing, with an adjective or alone, or any word."""
        noun = self.rng.choice((*THINGS, *NATURE)) if self.rng.random() < 0.6 else self.rng.choice(self.words)
        return f"{self.rng.choice(ADJECTIVES)} {noun}" if self.rng.random() < 0.25 else noun

    def action(self) -> str:
        """Returns what somebody does, as an infinitive."""
        if self.rng.random() < 0.35:
            return self.rng.choice(ALONE)
        verb = self.rng.choice(ACTIONS) if self.rng.random() < 0.8 else self.rng.choice(self.words)
        return f"{verb} {self.rng.choice(('the', 'a', 'my', 'some', 'this'))} {self.noun()}"

    def clause(self) -> str:
        """Returns a sentence without its capital letter and its full stop."""
        text = self.rng.choice(self.sentences).rstrip(".!?")
        return text if text.startswith("I ") else text[:1].lower() + text[1:]

    def fill(self, blank: str) -> str:
        """Returns what stands in a blank of this name. Raises KeyError for any other."""
        rng = self.rng
        drawn: dict[str, Callable[[], str]] = {
            "thing": self.noun,
            "things": lambda: f"{self.noun()}s",
            "a": lambda: f"a {self.noun()}",
            "the": lambda: f"{rng.choice(('the', 'the', 'my', 'your', 'this'))} {self.noun()}",
            "adjective": lambda: rng.choice(ADJECTIVES) if rng.random() < 0.6 else rng.choice(self.words),
            "mass": lambda: rng.choice(MASSES) if rng.random() < 0.6 else rng.choice(self.words),
            "word": lambda: rng.choice(self.words),
            "do": self.action,
            "did": lambda: rng.choice(VERBS),
            "clause": self.clause,
            "person": lambda: rng.choice((*PEOPLE, *NAMES)),
            "name": lambda: rng.choice(NAMES),
            "country": lambda: rng.choice(COUNTRIES),
            "language": lambda: rng.choice(LANGUAGES),
            "place": lambda: rng.choice(PLACES),
            "time": lambda: rng.choice(TIMES),
            "small": lambda: rng.choice(("two", "three", "four", "five", "ten")),
            "number": lambda: str(rng.randrange(2, 100)),
            "big": lambda: str(rng.randrange(50, 2000)),
        }
        return drawn[blank]()


def strange_prompts() -> list[str]:
    """Returns what the evaluation asks to see it refused."""
    return STRANGE.read_text(encoding="utf-8").splitlines()


def plain(prompt: str) -> str:
    """Returns a prompt without capitals and signs, to tell which ones ask the same."""
    return re.sub(r"[^a-z0-9+*' -]", "", prompt.lower()).strip()


def refused(
    rng: random.Random, words: Sequence[str], sentences: Sequence[str], known: Collection[str], count: int = COUNT
) -> Iterator[str]:
    """Yields prompts that are to be refused, in forms as people write them.

    Args:
        rng: chooses.
        words: from common to rare.
        sentences: statements.
        known: prompts that have an answer; neither these nor those of the evaluation are yielded.
        count: how many are drawn.
    """
    forms, fillers = FORMS.read_text(encoding="utf-8").splitlines(), Fillers(rng, words, sentences)
    left_out = {plain(prompt) for prompt in (*known, *strange_prompts())}
    for _ in range(count):
        text = re.sub(r"{(\w+)}", lambda match: fillers.fill(match[1]), rng.choice(forms))
        text = f"{text[0].upper()}{text[1:]}"
        if plain(text) not in left_out:
            yield as_typed(rng, text)


def as_typed(rng: random.Random, text: str) -> str:
    """Returns a text as it is, or without capitals, or without the sign at its end."""
    style = rng.random()
    if style < 0.1:
        return text.lower()
    return text.rstrip(".?!") if style < 0.2 else text
