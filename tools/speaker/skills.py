"""Asks a checkpoint for what it is to know, hear and see, and counts the answers that are right; texts alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from tools.speaker.codec import VOICES
from tools.speaker.refusals import TOY, strange_prompts
from tools.speaker.sentences import ADJECTIVES, DIGITS, THINGS, in_words
from tools.speaker.sound import SAMPLE_RATE, TEACHER_RATE, Wave, resample
from tools.speaker.tasks import counting, facts, held_out_tasks, sentence
from tools.speaker.teacher import speak

SPELLING = Path(__file__).parent / "data" / "spelling.txt"  # words that the last training did not ask for
COLORS = {
    **{"red": "#dc1e23", "green": "#23a03c", "blue": "#2346d7", "yellow": "#f5dc28"},
    **{"black": "#141414", "white": "#f5f5f5", "orange": "#f58c19", "purple": "#822da0"},
}
SHAPES = ("circle", "square", "triangle")


@dataclass(frozen=True)
class Question:
    """What is asked, with a sound at 16 kHz or a picture before it, and what is to be answered."""

    text: str
    wanted: str
    sound: Wave | None = None
    picture: Image.Image | None = None


def draw(color: str, shape: str, ground: str, rng: random.Random, side: int = 112) -> Image.Image:
    """Returns a square picture of one shape, somewhere on a ground."""
    picture = Image.new("RGB", (side, side), ground)
    size = rng.uniform(0.25, 0.42) * side
    x, y = (rng.uniform(size, side - size) for _ in range(2))
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse((x - size, y - size, x + size, y + size), fill=color)
    elif shape == "square":
        pen.rectangle((x - 0.9 * size, y - 0.9 * size, x + 0.9 * size, y + 0.9 * size), fill=color)
    else:
        pen.polygon([(x, y - size), (x - size, y + 0.8 * size), (x + size, y + 0.8 * size)], fill=color)
    return picture


def pictures(kind: str) -> Iterator[Question]:
    """Yields each shape in each color on white and on two other colors, with a question for what is seen of it."""
    rng = random.Random(5)
    for color in COLORS:
        for shape in SHAPES:
            others = [other for other in COLORS if other != color]
            for ground in ("white" if color not in ("white", "yellow") else "black", *rng.sample(others, 2)):
                picture = draw(COLORS[color], shape, COLORS[ground], rng)
                article = "an" if color == "orange" else "a"
                yield {
                    "see": Question("What do you see?", f"I see {article} {color} {shape}.", picture=picture),
                    "colors": Question("What color is it?", f"It is {color}.", picture=picture),
                    "shapes": Question("What shape is it?", f"It is a {shape}.", picture=picture),
                }[kind]


def spelling() -> Iterator[Question]:
    """Yields words to be spelled."""
    for word in SPELLING.read_text(encoding="utf-8").split():
        yield Question(f"Spell {word}.", f"{', '.join(word.upper())}.")


def sums() -> Iterator[Question]:
    """Yields every sum up to twenty, and every difference of two numbers up to twenty."""
    for first in range(21):
        for second in range(21):
            results = [("plus", first + second)] if first + second <= 20 else []
            results += [("minus", first - second)] if first >= second else []
            for word, result in results:
                wanted = sentence(f"{in_words(first)} {word} {in_words(second)} is {in_words(result)}")
                yield Question(f"What is {first} {word} {second}?", wanted)


def word_lists(words: tuple[str, ...], lengths: range, count: int, seed: int) -> list[list[str]]:
    """Returns lists of words drawn at random."""
    rng = random.Random(seed)
    return [[rng.choice(words) for _ in range(rng.choice(lengths))] for _ in range(count)]


def spoken_words(words: tuple[str, ...], count: int, seed: int) -> Iterator[Question]:
    """Yields lists of one to four words that the teacher says, in both voices."""
    for voice in VOICES.values():
        lists = word_lists(words, range(1, 5), count, seed)
        for said, utterance in zip(
            lists, speak([f"{' '.join(line)}." for line in lists], voice, wave=True), strict=True
        ):
            sound = (utterance.samples / 32768).astype(np.float32)
            yield Question("What do you hear?", f"{', '.join(said).capitalize()}.", sound)


def spoken_sums() -> Iterator[Question]:
    """Yields two digits each that the teacher says, in both voices, and the question for their sum."""
    for voice in VOICES.values():
        pairs = [(a, b) for a in range(10) for b in range(10) if (a + b) % 4 == 1]
        lines = [f"{DIGITS[a]} {DIGITS[b]}." for a, b in pairs]
        for (a, b), utterance in zip(pairs, speak(lines, voice, wave=True), strict=True):
            wanted = sentence(f"{DIGITS[a]} plus {DIGITS[b]} is {in_words(a + b)}")
            yield Question("What is the sum?", wanted, (utterance.samples / 32768).astype(np.float32))


def own_words(speaker: Any) -> Iterator[Question]:
    """Yields lists of one to four words that the checkpoint itself has said, in both voices."""
    for voice in VOICES:
        for said in word_lists((*DIGITS, *COLORS), range(1, 5), 10, 7):
            line = f"{', '.join(said).capitalize()}."
            wave = resample(speaker.answer(f"Say: {line}", line, voice).wave, SAMPLE_RATE, TEACHER_RATE)
            yield Question("What do you hear?", line, wave)


def questions_of(skill: str, speaker: Any) -> Iterator[Question]:
    """Returns the questions of a skill in `SKILLS`."""
    known: dict[str, Callable[[], Iterator[Question]]] = {
        "sums": sums,
        "spelling": spelling,
        "facts": lambda: (Question(task.prompt, task.reply) for task in list(facts())[::7]),
        "counting": lambda: (Question(task.prompt, task.reply) for task in list(counting())[::29]),
        "asked": lambda: (Question(prompt, reply) for prompt, reply in held_out_tasks()),
        "strange": lambda: (Question(text, TOY) for text in strange_prompts()),
        "heard": lambda: spoken_words((*DIGITS, *COLORS, *ADJECTIVES, *THINGS), 20, 23),
        "heard-sums": spoken_sums,
        "own": lambda: own_words(speaker),
        **{kind: partial(pictures, kind) for kind in ("see", "colors", "shapes")},
    }
    return known[skill]()


SKILLS = (
    *("asked", "sums", "spelling", "facts", "counting", "strange"),
    *("see", "colors", "shapes", "heard", "heard-sums", "own"),
)


def words_right(wanted: str, reply: str) -> tuple[int, int]:
    """Returns (words of the answer that stand in their place, words wanted)."""
    first, second = ([word.strip(".,").lower() for word in text.split()] for text in (wanted, reply))
    return sum(a == b for a, b in zip(first, second, strict=False)), len(first)


def ask(skill: str, speaker: Any) -> Iterator[str]:
    """Yields a line for every answer that is not the wanted one, at the end the counts."""
    exact = asked = right = words = 0
    for question in questions_of(skill, speaker):
        reply = speaker.reply(speaker.inputs(question.text, question.sound, question.picture)).strip()
        exact, asked = exact + (reply == question.wanted), asked + 1
        in_place, total = words_right(question.wanted, reply)
        right, words = right + in_place, words + total
        if reply != question.wanted:
            yield f"    {question.text!r}: {reply!r} for {question.wanted!r}"
    yield f"{skill:10} text exact {exact} of {asked}, words in their place {right} of {words}"
