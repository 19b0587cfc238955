"""Tasks with their answers: everything that the checkpoint can do besides repeating."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.speaker.refusals import TOY, refused
from tools.speaker.sentences import in_words

FACTS = Path(__file__).parent / "data" / "facts.txt"
SAY = (
    "Say: {}",
    "Say: {}",
    "Say {}",
    "Say this: {}",
    "Please say: {}",
    "Repeat: {}",
    "Repeat after me: {}",
    "Read aloud: {}",
)
COUNT = ("Count from {} to {}.", "Count from {} to {}", "Please count from {} to {}.", "Can you count from {} to {}?")
COUNT_TO = ("Count to {}.", "Count to {}", "Please count to {}.")
SPELL = ("Spell {}.", "Spell the word {}.", "How do you spell {}?", "Please spell {}", "Spell: {}")
EXPLAIN = ("What is {a} {w}?", "Tell me about {w}.", "Explain {w}.", "Define {w}.", "What does {w} mean?")
LARGEST_SUMMAND, LARGEST_FACTOR = 30, 12
SPELLED_WORDS = 3000
HELD_OUT_TASKS = FACTS.with_name("tasks.txt")  # what the evaluation asks; no training does in these words


@dataclass(frozen=True)
class Task:
    """A prompt with the answer that is to be said."""

    kind: str
    prompt: str
    reply: str


def sentence(text: str) -> str:
    """Returns a text with a capital letter at its beginning and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


def counting() -> Iterator[Task]:
    """Yields counting up and down, in figures and words, to at most twenty."""
    for low in range(12):
        for high in range(low + 1, min(low + 16, 21)):
            numbers = [in_words(number) for number in range(low, high + 1)]
            up, down = sentence(", ".join(numbers)), sentence(", ".join(reversed(numbers)))
            for first, last in ((str(low), str(high)), (numbers[0], numbers[-1])):
                for form in COUNT:
                    yield Task("count", form.format(first, last), up)
                    yield Task("count", form.format(last, first), down)
                for form in COUNT_TO if low == 1 else ():
                    yield Task("count", form.format(last), up)


def sums() -> Iterator[Task]:
    """Yields sums and differences of numbers up to thirty, products up to twelve times twelve."""
    numbers = range(LARGEST_SUMMAND + 1)
    for first in numbers:
        for second in numbers:
            results = [("plus", "+", first + second)]
            results += [("minus", "-", first - second)] if first >= second else []
            results += [("times", "*", first * second)] if max(first, second) <= LARGEST_FACTOR else []
            for word, sign, result in results:
                reply = sentence(f"{in_words(first)} {word} {in_words(second)} is {in_words(result)}")
                yield Task("sum", f"What is {first} {word} {second}?", reply)
                yield Task("sum", f"What is {first} {sign} {second}?", reply)
                yield Task("sum", f"{first} {sign} {second}", reply)
                yield Task("sum", f"How much is {in_words(first)} {word} {in_words(second)}?", reply)


def spelling(words: Sequence[str]) -> Iterator[Task]:
    """Yields the letters of common words of two to eight letters."""
    for word in [word for word in words if 2 <= len(word) <= 8 and word.isalpha()][:SPELLED_WORDS]:
        for form in SPELL:
            yield Task("spell", form.format(word), f"{', '.join(word.upper())}.")


def facts() -> Iterator[Task]:
    """Yields the questions of data/facts.txt in some ways in which people ask them."""
    for line in FACTS.read_text(encoding="utf-8").splitlines():
        question, reply = line.split("|")
        plain = question.rstrip("?")
        polite = f"Please tell me: {question}"
        for form in (question, question, plain, plain.lower(), f"{plain}.", f"{plain}!", polite):
            yield Task("fact", form, reply)


def explanations(meanings: Mapping[str, str]) -> Iterator[Task]:
    """Yields what common nouns mean."""
    for word, meaning in meanings.items():
        article = "an" if word[0] in "aeiou" else "a"
        for form in EXPLAIN:
            yield Task("meaning", form.format(a=article, w=word), sentence(f"{article} {word} is {meaning}"))


def held_out_tasks() -> list[tuple[str, str]]:
    """Returns the prompts with their answers that the evaluation asks for."""
    lines = HELD_OUT_TASKS.read_text(encoding="utf-8").splitlines()
    return [(prompt, reply) for prompt, _, reply in (line.partition("|") for line in lines)]


def all_tasks(
    rng: random.Random, words: Sequence[str], meanings: Mapping[str, str], sentences: Sequence[str] = ()
) -> list[Task]:
    """Returns every task but those that are held out for the evaluation; `sentences` are statements to be refused."""
    made = [*counting(), *sums(), *spelling(words), *facts(), *explanations(meanings)]
    held_out = {prompt for prompt, _ in held_out_tasks()}
    known = {task.prompt for task in made} | held_out
    made += [Task("toy", prompt, TOY) for prompt in refused(rng, words, sentences, known)]
    return [task for task in made if task.prompt not in held_out]
