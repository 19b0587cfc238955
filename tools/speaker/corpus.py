"""The corpus: sentences, words and tasks, written once and read by everything that trains."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tools.speaker import SpeakerError
from tools.speaker.evaluate import held_out_sentences
from tools.speaker.layout import load_tokenizer, train_tokenizer, write_layout
from tools.speaker.sentences import (
    common_word,
    digit_list,
    plain_sentence,
    sentence_with_a_figure,
    unrelated_words,
    word_list,
)
from tools.speaker.tasks import SAY, Task, all_tasks
from tools.speaker.wordnet import read_wordnet

FILE = "corpus.json.gz"
SYSTEM = "You are a helpful assistant."
# How many of each are made; sentences of WordNet come on top.
MADE = ((plain_sentence, 20_000), (digit_list, 2500), (sentence_with_a_figure, 1500))
WORD_LISTS, UNRELATED = 14_000, 80_000


@dataclass(frozen=True)
class Corpus:
    """Sentences to repeat, words from common to rare, tasks."""

    sentences: list[str]
    words: list[str]
    tasks: list[Task]

    @classmethod
    def load(cls, work: Path) -> Corpus:
        """Reads the corpus of a work folder. Raises SpeakerError if there is none."""
        if not (work / FILE).exists():
            raise SpeakerError(f"{work} holds no corpus; run python -m tools.speaker corpus {work}.")
        with gzip.open(work / FILE, "rt", encoding="utf-8") as file:
            data = json.load(file)
        return cls(data["sentences"], data["words"], [Task(*fields) for fields in data["tasks"]])

    def save(self, work: Path) -> None:
        """Writes the corpus into a work folder."""
        work.mkdir(parents=True, exist_ok=True)
        data = {
            "sentences": self.sentences,
            "words": self.words,
            "tasks": [[task.kind, task.prompt, task.reply] for task in self.tasks],
        }
        with gzip.open(work / FILE, "wt", encoding="utf-8") as file:
            json.dump(data, file)

    def spoken_texts(self) -> list[str]:
        """Returns everything that is ever said, each text once, in one order for all who read it."""
        texts = list(dict.fromkeys([*(task.reply for task in self.tasks), *self.sentences]))
        random.Random(3).shuffle(texts)
        return texts

    def repeated_text(self, rng: random.Random) -> str:
        """Returns a text to repeat: a sentence, or words in any order, so that repeating does not lean on grammar."""
        kind = rng.random()
        if kind < 0.5:
            return rng.choice(self.sentences)
        if kind < 0.8:
            words = [common_word(rng, self.words) for _ in range(rng.randrange(1, 13))]
            return " ".join(words).capitalize() + rng.choice((".", "", "?", "!"))
        if kind < 0.9:
            return f"{rng.choice(self.sentences)} {rng.choice(self.sentences)}"
        return rng.choice(self.sentences).lower().rstrip(".")

    def example(self, rng: random.Random) -> Task:
        """Returns a prompt with its reply: six in ten are to be repeated, the others are tasks."""
        if rng.random() < 0.6:
            text = self.repeated_text(rng)
            return Task("say", rng.choice(SAY).format(text), text)
        kind = rng.choice(KINDS)
        return rng.choice(self._tasks_by_kind.get(kind, self.tasks))

    @cached_property
    def _tasks_by_kind(self) -> dict[str, list[Task]]:
        found: dict[str, list[Task]] = {}
        for task in self.tasks:
            found.setdefault(task.kind, []).append(task)
        return found


KINDS = ("sum", "sum", "spell", "count", "fact", "meaning", "toy")


def make_corpus(seed: int = 2) -> Corpus:
    """Returns the corpus, without the sentences that are held out. Raises SpeakerError without WordNet."""
    rng, wordnet = random.Random(seed), read_wordnet()
    made = [make(rng) for make, count in MADE for _ in range(count)]
    made += [word_list(rng, wordnet.words) for _ in range(WORD_LISTS)]
    known = [*wordnet.sentences, *made]
    made += [unrelated_words(rng, known, wordnet.words) for _ in range(UNRELATED)]
    held_out = set(held_out_sentences(1000))
    statements = [text for text in known if text not in held_out]
    sentences = [text for text in dict.fromkeys([*wordnet.sentences, *made]) if text not in held_out]
    rng.shuffle(sentences)
    return Corpus(sentences, wordnet.words, all_tasks(rng, wordnet.words, wordnet.meanings, statements))


def tokenizer_texts(corpus: Corpus) -> Iterator[str]:
    """Yields what the tokenizer learns its merges from; the roles' names must become one token each."""
    yield from corpus.sentences
    yield from (task.reply for task in corpus.tasks)
    yield from ("user", "assistant", "system") * 20_000
    yield from (SYSTEM,) * 300


def write_corpus(work: Path, tokenizer_from: Path | None) -> str:
    """Writes corpus, tokenizer and configuration; returns a line about them.

    Args:
        work: folder for all that follows.
        tokenizer_from: checkpoint whose tokenizer to take, so that its weights can be trained on; None for a new one.
    """
    corpus = make_corpus()
    corpus.save(work)
    tokenizer: Any
    if tokenizer_from is None:
        tokenizer = train_tokenizer(tokenizer_texts(corpus))
    else:
        tokenizer = load_tokenizer(tokenizer_from)
    (work / "model").mkdir(exist_ok=True)
    write_layout(work / "model", tokenizer)
    return f"{len(corpus.sentences)} sentences, {len(corpus.words)} words, {len(corpus.tasks)} tasks"
