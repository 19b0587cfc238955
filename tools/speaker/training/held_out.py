"""What the training judges thinker and talker by, as token ids, and the teacher's codes of it."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.speaker.codec import VOICES, encode
from tools.speaker.corpus import Corpus
from tools.speaker.evaluate import held_out_sentences
from tools.speaker.heard import said_texts
from tools.speaker.numbers import in_words
from tools.speaker.refusals import TOY, strange_prompts
from tools.speaker.sentences import unrelated_words
from tools.speaker.skills import SPELLING
from tools.speaker.tasks import held_out_tasks, sentence
from tools.speaker.teacher import speak
from tools.speaker.training.prompts import Prompts
from tools.speaker.training.stored import FOLDER, HELD_OUT

MIXED, DRAWN, OTHER_TASKS = 30, 60, 22
EVERY = 1000  # more than there are held-out sentences


def unknown_words(corpus: Corpus) -> list[str]:
    """Returns words without grammar that are no text of the training."""
    rng, known = random.Random(99), set(said_texts(corpus)[0])
    drawn = [unrelated_words(rng, corpus.sentences, corpus.words) for _ in range(DRAWN)]
    return [text for text in drawn if text not in known][:MIXED]


def checks(corpus: Corpus) -> Iterator[tuple[str, str, str]]:
    """Yields (group, prompt, reply) for the thinker."""
    yield from (("asked", prompt, reply) for prompt, reply in held_out_tasks())
    for a in range(0, 21, 2):
        for b in range(1, 20, 4):
            if a + b <= 20:
                reply = sentence(f"{in_words(a)} plus {in_words(b)} is {in_words(a + b)}")
                yield "sums", f"What is {a} plus {b}?", reply
    for word in SPELLING.read_text(encoding="utf-8").split():
        yield "spell", f"Spell {word}.", f"{', '.join(word.upper())}."
    yield from (("say", f"Say: {text}", text) for text in [*held_out_sentences(EVERY), *unknown_words(corpus)])
    yield from (("toy", text, TOY) for text in strange_prompts())


def spoken(corpus: Corpus, prompts: Prompts) -> Iterator[dict[str, Any]]:
    """Yields sentences, words without grammar and replies to tasks, in both voices, with the teacher's codes."""
    replies = [task.reply for task in corpus.tasks if task.kind != "toy"]
    tasks = [reply for _, reply in held_out_tasks() if reply != TOY]
    tasks += random.Random(99).sample(replies, min(OTHER_TASKS, len(replies)))
    groups = {"sentences": held_out_sentences(EVERY), "unrelated": unknown_words(corpus), "tasks": tasks}
    for name, texts in groups.items():
        for voice in VOICES.values():
            for text, utterance in zip(texts, speak(texts, voice, wave=False), strict=True):
                asked, reply = prompts.encode([prompts.wrap(f"Say: {text}"), text])
                codes = encode(utterance, voice)[0].tolist()
                ids = {"asked": asked.tolist(), "reply": reply.tolist(), "codes": codes}
                yield {"group": name, "voice": voice.name, **ids}


def write_held_out(work: Path) -> int:
    """Writes both lists; returns how long they are together. Raises SpeakerError if the teacher is not built."""
    corpus, prompts = Corpus.load(work), Prompts(work)
    thinker = [
        {"group": group, "asked": asked.tolist(), "reply": said.tolist()}
        for group, prompt, reply in checks(corpus)
        for asked, said in [prompts.encode([prompts.wrap(prompt), reply])]
    ]
    talker = list(spoken(corpus, prompts))
    with gzip.open(work / FOLDER / HELD_OUT, "wt", encoding="utf-8") as file:
        json.dump({"thinker": thinker, "talker": talker}, file)
    return len(thinker) + len(talker)
