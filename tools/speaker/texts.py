"""Texts to be said, and tasks with their answers: everything that the checkpoint learns to reply to a text."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from tools.speaker import SpeakerError
from tools.speaker.judge import held_out_speech

DATA = Path(__file__).parent / "data"
TOY = "I am only a toy. I can repeat, count, spell, and do small sums."
COLORS = {
    **{"red": "#dc1e23", "green": "#23a03c", "blue": "#2346d7", "yellow": "#f5dc28"},
    **{"black": "#141414", "white": "#f5f5f5", "orange": "#f58c19", "purple": "#822da0"},
}
SHAPES = ("circle", "square", "triangle")
ASK = ("{0}?", "{0}?", "{0}?", "{0}", "{0}", "{0}.", "{0}.", "{0}!", "Please tell me: {0}?", "And now: {0}?")
# How often each kind of task is drawn: for the thinker, and for the talker, which needs no practice in refusing.
THINKER_KINDS = {"say": 32, "sum": 20, "spell": 13, "count": 6, "fact": 24, "toy": 22}
TALKER_KINDS = {"say": 75, "sum": 5, "spell": 5, "count": 3, "fact": 11, "toy": 1}
ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
DIGITS = ONES[:10]


@cache
def lines_of(name: str) -> tuple[str, ...]:
    """Returns the lines of a file in `data/`."""
    return tuple((DATA / name).read_text(encoding="utf-8").splitlines())


@cache
def pairs_of(name: str) -> tuple[tuple[str, str], ...]:
    """Returns the lines of a file in `data/`, each a prompt and its reply."""
    return tuple((prompt, reply) for prompt, _, reply in (line.partition("|") for line in lines_of(name)))


# What a demonstration should not say. A sentence with one of these words is left out.
LEFT_OUT = re.compile(rf"\b({'|'.join(lines_of('left_out.txt'))})\w*\b", re.IGNORECASE)
# Lists of words, in which `{name}` stands for one of the list of that name and ~ for a comma, and lists of forms.
LISTS: dict[str, Sequence[str]] = {
    name: [option.replace("~", ",") for option in options.split(", ")]
    for name, options in (line.split(": ", 1) for line in lines_of("words.txt"))
}
HEARD = tuple(dict.fromkeys([*DIGITS, *COLORS, *LISTS["adjective"], *LISTS["item"]]))  # the words that it can hear


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


def sentence(text: str) -> str:
    """Returns a text with a capital letter, a full stop, and "an" where it belongs; "" for one without words."""
    text = re.sub(r"\ba (?=[aeiou])", "an ", " ".join(text.split()).strip("`'\"-;:, "))
    return text and text[0].upper() + text[1:] + ("" if text[-1] in ".!?" else ".")


def plain(prompt: str) -> str:
    """Returns a prompt without capitals and signs, to tell which ones ask the same."""
    return re.sub(r"[^a-z0-9+*' -]", "", prompt.lower()).strip()


def listed(words: Sequence[str]) -> str:
    """Returns words as the thinker writes down what it hears."""
    return f"{', '.join(words).capitalize()}."


def sum_of(words: Sequence[str]) -> str:
    """Returns the sum of two digits; "" for other words."""
    if len(words) != 2 or not set(words) <= set(DIGITS):
        return ""
    return sentence(f"{words[0]} plus {words[1]} is {in_words(sum(map(DIGITS.index, words)))}")


def seen(color: str, shape: str) -> str:
    """Returns what is said of a picture."""
    return f"I see {'an' if color == 'orange' else 'a'} {color} {shape}."


class Texts:
    """Draws prompts with their replies, none of those that the evaluation asks; words are from common to rare."""

    def __init__(self, sentences: Sequence[str], words: Sequence[str]) -> None:
        self.sentences, self.words = sentences, words
        self.to_spell = [word for word in words if 2 <= len(word) <= 10 and word not in lines_of("spelling.txt")]
        self.lists: Mapping[str, Sequence[str]] = {
            **LISTS,
            "word": words[:4000],
            "clause": [text[: 1 + text.startswith("I ")].lower() + text[1:].rstrip(".!?") for text in sentences],
            "number": [str(number) for number in range(2, 100)],
            "big": [str(number) for number in range(50, 2000)],
            "count": [in_words(number) for number in range(2, 100)],
        }
        self.kinds: Mapping[str, Callable[[random.Random], tuple[str, str]]] = {
            **{"say": self.ask_say, "fact": self.ask_fact, "count": self.ask_count},
            **{"sum": self.ask_sum, "spell": self.ask_spell, "toy": self.ask_toy},
        }
        self.held_out = {prompt for prompt, _ in pairs_of("tasks.txt")} | set(lines_of("sentences.txt"))
        self.unknown = {plain(prompt) for prompt in (*lines_of("strange.txt"), *dict(pairs_of("facts.txt")))}

    @classmethod
    def read(cls, folder: Path) -> Texts:
        """Takes the examples of WordNet as sentences, the words of its glosses as words.

        Raises SpeakerError if it is not installed.
        """
        if not (folder / "data.noun").exists():
            raise SpeakerError(f"{folder} holds no WordNet: apt-get install wordnet-base, or name another folder.")
        glosses = "\n".join(path.read_text(encoding="latin-1") for path in sorted(folder.glob("data.*")))
        examples = re.findall(r'"([A-Za-z,\'\-?!. ]{3,90})"', glosses)
        held_out = {*(text for text, _, _ in held_out_speech()), *lines_of("sentences.txt")}
        sentences = [sentence(text) for text in dict.fromkeys(examples) if 3 <= len(text.split()) <= 14]
        counts = Counter(re.findall(r"(?<![\w'-])[a-z]+(?![\w'-])", glosses))
        return cls(
            [text for text in sentences if text not in held_out and not LEFT_OUT.search(text)],
            [word for word, count in counts.most_common(24_000) if len(word) > 1 and not LEFT_OUT.search(word)],
        )

    def ask(self, rng: random.Random, kinds: Mapping[str, int]) -> tuple[str, str]:
        """Returns a prompt of some kind, drawn by these weights, and its reply."""
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        prompt, reply = self.kinds[kind](rng)
        refused_twice = kind == "toy" and plain(prompt) in self.unknown
        return self.ask(rng, kinds) if refused_twice or prompt in self.held_out else (prompt, reply)

    def fill(self, rng: random.Random, text: str) -> str:
        """Returns a text with every blank filled."""
        while blank := re.search(r"{(\w+)}", text):
            text = text[: blank.start()] + rng.choice(self.lists[blank[1]]) + text[blank.end() :]
        return text

    def repeated(self, rng: random.Random) -> str:
        """Returns a text to repeat: a sentence, or words without grammar, so that nobody learns to guess them."""
        kind = rng.random()
        if kind < 0.05:
            return rng.choice(pairs_of("facts.txt"))[1]
        if kind < 0.4:
            text = rng.choice(self.sentences)
            return text if kind < 0.35 else text.lower().rstrip(".")
        if kind < 0.55:
            return sentence(self.fill(rng, "{sentence}"))
        if kind < 0.85:
            return sentence(" ".join(self.word(rng) for _ in range(rng.randrange(1, 13))))
        if kind < 0.95:
            return listed(heard_words(rng))
        return seen(rng.choice(list(COLORS)), rng.choice(SHAPES))

    def word(self, rng: random.Random) -> str:
        """Returns a word, as often as it stands in sentences, or a common one rather than a rare one."""
        if rng.random() < 0.5:
            return rng.choice(rng.choice(self.sentences).split()).strip(",.?!'-").lower()
        return self.words[int(rng.random() ** 2 * len(self.words))]

    def ask_say(self, rng: random.Random) -> tuple[str, str]:
        """Returns a text to be repeated."""
        text = self.repeated(rng)
        return rng.choice(LISTS["say"]).format(text), text

    def ask_fact(self, rng: random.Random) -> tuple[str, str]:
        """Returns a question of data/facts.txt in a way in which people ask it."""
        question, reply = rng.choice(pairs_of("facts.txt"))
        question, chance, thing = question.rstrip("?"), rng.random(), question.removeprefix("What is ").rstrip("?")
        asked = rng.choice(ASK).format(question)
        if reply.startswith("The capital of ") and chance < 0.3:
            asked = rng.choice(LISTS["capital"]).format(reply[15:].partition(" is ")[0])
        elif thing != question and chance < 0.5:
            asked = rng.choice(LISTS["fact what"]).format(thing)
        return asked.lower() if rng.random() < 0.15 else asked, reply

    def ask_count(self, rng: random.Random) -> tuple[str, str]:
        """Returns counting up or down, in figures or words, to at most twenty."""
        low = rng.choice((1, rng.randrange(12)))
        numbers = list(range(low, rng.randrange(low + 1, min(low + 16, 21)) + 1))
        numbers = numbers[:: rng.choice((1, -1))]
        first, last = (in_words(n) if rng.random() < 0.5 else str(n) for n in (numbers[0], numbers[-1]))
        form = rng.choice(LISTS["count from"] if numbers[0] != 1 or rng.random() < 0.6 else LISTS["count to"])
        return form.format(last, first), sentence(", ".join(map(in_words, numbers)))

    def ask_sum(self, rng: random.Random) -> tuple[str, str]:
        """Returns a sum or a difference of numbers up to thirty, more often up to twenty, or a product up to twelve."""
        word = rng.choice(("plus", "plus", "minus", "minus", "times"))
        a, b = (rng.randint(0, 12 if word == "times" else rng.choice((10, 20, 20, 30))) for _ in range(2))
        if word == "minus" and rng.random() < 0.85:
            a, b = max(a, b), min(a, b)
        result = {"plus": a + b, "minus": a - b, "times": a * b}[word]
        total = f"{'minus ' * (result < 0)}{in_words(abs(result))}"
        reply = sentence(f"{in_words(a)} {word} {in_words(b)} is {total}")
        shown = [in_words(n) if chance < 0.5 else str(n) for n, chance in ((a, rng.random()), (b, rng.random()))]
        asked = rng.choice(LISTS[f"sum {word}"]).format(a=shown[0], b=shown[1])
        asked = asked[0].upper() + asked[1:] if rng.random() < 0.5 else asked
        asked += rng.choice(("", "?", ".")) if asked[-1].isalnum() else ""
        return asked.lower() if rng.random() < 0.1 else asked, reply

    def ask_spell(self, rng: random.Random) -> tuple[str, str]:
        """Returns a word to be spelled, in a fifth of the cases the beginning of one with the end of another."""
        word = rng.choice(self.to_spell[:4000] if rng.random() < 0.5 else self.to_spell)
        if rng.random() < 0.2:
            other = rng.choice(self.to_spell)
            made = word[: rng.randrange(1, len(word))] + other[rng.randrange(1, len(other)) :]
            word = made if len(made) <= 10 and made not in lines_of("spelling.txt") else word
        asked = word.capitalize() if rng.random() < 0.15 else word
        return rng.choice(LISTS["spell"]).format(asked), f"{', '.join(word.upper())}."

    def ask_toy(self, rng: random.Random) -> tuple[str, str]:
        """Returns a prompt that is to be refused, in a form of data/refused.txt."""
        text = self.fill(rng, rng.choice(lines_of("refused.txt")))
        text, style = text[0].upper() + text[1:], rng.random()
        return text.lower() if style < 0.1 else text.rstrip(".?!") if style < 0.2 else text, TOY


def heard_words(rng: random.Random) -> list[str]:
    """Returns one to five digits, or one to four words."""
    words, most = (DIGITS, 5) if rng.random() < 0.5 else (HEARD, 4)
    return [rng.choice(words) for _ in range(rng.randint(1, most))]
