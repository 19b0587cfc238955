"""Writes on a CPU all that the training of thinker and talker reads, so that the machine with the GPU makes no tokens.

WORK/prepared/text.npz           token ids: replies with words and prompts, examples for the thinker; phones of codes
WORK/prepared/recipe.json        what stands around them, what is heard and seen, sizes of the parts
WORK/prepared/held_out.json.gz   what answers are judged by (`write_held_out`)
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.speaker import SpeakerError
from tools.speaker.codec import SOUNDS, VOICES, encode
from tools.speaker.corpus import SYSTEM, Corpus
from tools.speaker.evaluate import held_out_sentences
from tools.speaker.heard import heard_lists, listed, said_texts, seen_replies, sum_of
from tools.speaker.layout import SIZES, TOKENS, load_tokenizer, speaker_config
from tools.speaker.refusals import TOY, strange_prompts
from tools.speaker.sentences import in_words, unrelated_words
from tools.speaker.skills import COLORS, SHAPES, SPELLING
from tools.speaker.tasks import SAY, SPELL, Task, held_out_tasks, sentence
from tools.speaker.teacher import speak
from tools.speaker.training.stored import FOLDER, HELD_OUT, RECIPE, TEXTS

EXAMPLES, LONGEST = 300_000, 128  # of the thinker; tokens
SPELLED_WORDS = 24_000
SPELLED_LETTERS = range(2, 11)
MADE_UP_WORDS = 0.2  # of what is to be spelled are the beginning of one word and the end of another
OWN_TASK = 0.7  # of the replies to tasks follow their task; the others are to be repeated
SAID_TEXT = 0.25  # of what is to be repeated is one of the talker's texts
# Weights of the kinds of examples; "small" are sums of numbers up to twenty.
KINDS = {"say": 40, "sum": 7, "small": 10, "spell": 15, "count": 6, "fact": 9, "meaning": 3, "toy": 22}
WORD = re.compile(r"[A-Za-z']+|\d+")
HEAR = ("What do you hear?", "Which words do you hear?", "Repeat what you hear.", "", "Write down what you hear.")
SUMS = ("What is the sum?", "Add what you hear.", "What is the sum of these digits?", "Add them.")
SEE = ("What do you see?", "What is in the picture?", "Describe the picture.", "What does the picture show?", "")
COLOR = ("What color is it?", "Which color do you see?")
SHAPE = ("What shape is it?", "Which shape do you see?")
MARK = "@@"
FIELDS = {
    "text": (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        "num_key_value_heads",
    ),
    "audio": (
        *("d_model", "num_mel_bins", "output_dim", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    ),
    "vision": (
        *("hidden_size", "out_hidden_size", "intermediate_size", "num_heads", "depth", "fullatt_block_indexes"),
        "window_size",
    ),
}
FIELDS["talker"] = (*FIELDS["text"], "embedding_size", "head_dim")
MIXED, DRAWN, OTHER_TASKS = 30, 60, 22
EVERY = 1000  # more than there are held-out sentences
Ids = npt.NDArray[np.int64]


class Prompts:
    """The tokenizer, and the chat template around a user's message."""

    def __init__(self, work: Path) -> None:
        self.tokenizer = load_tokenizer(work / "model")
        self.end = int(self.tokenizer.convert_tokens_to_ids("<|im_end|>"))
        self.audio = int(self.tokenizer.convert_tokens_to_ids("<|AUDIO|>"))

    def wrap(self, message: str, system: str = SYSTEM) -> str:
        """Returns the whole prompt of a user's message."""
        return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the token ids of each text."""
        return [np.array(ids, np.int64) for ids in self.tokenizer(list(texts))["input_ids"]] if texts else []


def packed(name: str, lists: Sequence[Ids]) -> dict[str, npt.NDArray[Any]]:
    """Returns the arrays NAME and NAME_starts of lists."""
    starts = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    return {name: np.concatenate(lists).astype(np.int16), f"{name}_starts": starts}


class Messages:
    """Token ids of messages, and what stands around them in every prompt."""

    def __init__(self, prompts: Prompts) -> None:
        self.prompts = prompts
        self.prefix, self.suffix = self.around(MARK, MARK)

    def around(self, message: str, mark: str) -> tuple[list[int], list[int]]:
        """Returns the ids before and behind a mark in a message's prompt."""
        whole, inner = (ids.tolist() for ids in self.prompts.encode([self.prompts.wrap(message), mark]))
        at = next((i for i in range(len(whole)) if whole[i : i + len(inner)] == inner), None)
        if at is None:
            raise SpeakerError(f"The tokenizer merges {mark!r} with what stands around it; make another tokenizer.")
        return whole[:at], whole[at + len(inner) :]

    def encode(self, messages: Sequence[str]) -> list[Ids]:
        """Returns the ids of messages. Raises SpeakerError if within a prompt one of 400 would have others."""
        found = self.prompts.encode(messages)
        for number in random.Random(1).sample(range(len(messages)), min(400, len(messages))):
            whole = self.prompts.encode([self.prompts.wrap(messages[number])])[0]
            if whole.tolist() != [*self.prefix, *found[number], *self.suffix]:
                raise SpeakerError(f"Within a prompt {messages[number]!r} has other tokens than alone.")
        return found

    def media(self, kind: str, questions: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Returns the ids before a sound or picture, and for each question those behind it."""
        ends = [self.around(f"<|{kind}_bos|>{MARK}<|{kind}_eos|>{question}", MARK) for question in questions]
        return ends[0][0], [behind for _, behind in ends]


def words_of_tokens(text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Returns which word of a text each token belongs to, or -1, and how many words there are."""
    which = [-1] * len(text)
    count = 0
    for match in WORD.finditer(text):
        which[match.start() : match.end()] = [count] * len(match.group())
        count += 1
    return [next((n for n in which[begin:end] if n >= 0), -1) for begin, end in spans], count


def talker_arrays(corpus: Corpus, messages: Messages) -> dict[str, npt.NDArray[Any]]:
    """Returns every text that is said, with its words and a prompt of its own."""
    rng, (texts, own) = random.Random(17), said_texts(corpus)
    asked: dict[str, list[str]] = {}
    for task in corpus.tasks:
        asked.setdefault(task.reply, []).append(task.prompt)
    prompts = [
        rng.choice(asked[text]) if text in asked and rng.random() < OWN_TASK else rng.choice(SAY).format(text)
        for text in texts
    ]
    made = messages.prompts.tokenizer(texts, return_offsets_mapping=True)
    words = [words_of_tokens(text, spans) for text, spans in zip(texts, made["offset_mapping"], strict=True)]
    is_task = [text in asked or number >= own for number, text in enumerate(texts)]
    return {
        **packed("replies", [np.array(ids, np.int64) for ids in made["input_ids"]]),
        **packed("messages", messages.encode(prompts)),
        "reply_words": np.concatenate([np.array(which, np.int16) for which, _ in words]),
        "word_counts": np.array([count for _, count in words], np.int16),
        "is_task": np.array(is_task),
    }


class Examples:
    """Draws prompts with replies for the thinker; those that the evaluation asks are left out."""

    def __init__(self, corpus: Corpus) -> None:
        self.rng, self.corpus, self.texts = random.Random(18), corpus, said_texts(corpus)[0]
        self.tasks: dict[str, list[Task]] = {}
        for task in corpus.tasks:
            self.tasks.setdefault(task.kind, []).append(task)
        self.tasks["small"] = [task for task in self.tasks.get("sum", ()) if _is_small(task)]
        held_out = set(SPELLING.read_text(encoding="utf-8").split())
        words = [word for word in corpus.words[:SPELLED_WORDS] if word.isalpha() and word.isascii()]
        self.words = [word for word in words if len(word) in SPELLED_LETTERS and word not in held_out]
        self.held_out = held_out

    def draw(self) -> tuple[str, str]:
        """Returns a prompt and its reply."""
        rng = self.rng
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "say":
            text = rng.choice(self.texts) if rng.random() < SAID_TEXT else self.corpus.repeated_text(rng)
            return rng.choice(SAY).format(text), text
        if kind == "spell" and self.words:
            word = self.word()
            asked = word if rng.random() < 0.85 else word.capitalize()
            return rng.choice(SPELL).format(asked), f"{', '.join(word.upper())}."
        task = rng.choice(self.tasks.get(kind) or self.corpus.tasks)
        return task.prompt, task.reply

    def word(self) -> str:
        """Returns a word to spell, a common one as often as a rare one."""
        rng = self.rng
        word = rng.choice(self.words[:4000] if rng.random() < 0.5 else self.words)
        if rng.random() < MADE_UP_WORDS:
            other = rng.choice(self.words)
            made = word[: rng.randrange(1, len(word))] + other[rng.randrange(1, len(other)) :]
            return made if len(made) in SPELLED_LETTERS and made not in self.held_out else word
        return word


def _is_small(task: Task) -> bool:
    numbers = [int(number) for number in re.findall(r"\d+", task.prompt)]
    return len(numbers) == 2 and max(numbers) <= 20


def thinker_arrays(corpus: Corpus, messages: Messages, count: int) -> dict[str, npt.NDArray[Any]]:
    """Returns up to `count` prompts with replies of at most 128 tokens together."""
    source = Examples(corpus)
    drawn = [source.draw() for _ in range(count)]
    held_out = {prompt for prompt, _ in held_out_tasks()}
    drawn = [(asked, reply) for asked, reply in drawn if asked not in held_out]
    asked = messages.encode([asked for asked, _ in drawn])
    replies = messages.prompts.encode([reply for _, reply in drawn])
    room = LONGEST - len(messages.prefix) - len(messages.suffix) - 1
    kept = [number for number in range(len(drawn)) if len(asked[number]) + len(replies[number]) <= room]
    return packed("asked", [asked[n] for n in kept]) | packed("answers", [replies[n] for n in kept])


def make_recipe(messages: Messages) -> dict[str, Any]:
    """Returns what is no array of its own."""
    prompts = messages.prompts
    config = speaker_config(prompts.tokenizer.convert_tokens_to_ids("user"))
    thinker = config.thinker_config
    parts = {"text": thinker.text_config, "audio": thinker.audio_config, "vision": thinker.vision_config}
    parts["talker"] = config.talker_config
    audio_head, audio_tails = messages.media("audio", (*HEAR, *SUMS))
    vision_head, vision_tails = messages.media("vision", (*SEE, *COLOR, *SHAPE))

    def ids(texts: Sequence[str]) -> list[list[int]]:
        return [found.tolist() for found in prompts.encode(texts)]

    return {
        "sizes": {name: {field: getattr(parts[name], field) for field in fields} for name, fields in FIELDS.items()},
        "prefix": messages.prefix,
        "suffix": messages.suffix,
        "end": prompts.end,
        "ids": TOKENS.special_ids(),
        "voices": TOKENS.voices,
        "codec": {
            "vocab_size": SIZES["codec_vocabulary"],
            "sounds": SIZES["sounds"],
            **{name: SIZES[f"codec_{name}"] for name in ("pad", "start", "end")},
        },
        "audio": prompts.audio,
        "audio_head": audio_head,
        "audio_tails": audio_tails,
        "audio_questions": len(HEAR),
        "lists": ids([listed(words) for words in heard_lists()]),
        "sums": ids([sum_of(words) for words in heard_lists()]),
        "vision_head": vision_head,
        "vision_tails": vision_tails,
        "vision_questions": len(SEE),
        "color_questions": len(COLOR),
        "seen": ids(seen_replies()),
        "colors": {name: [int(value[at : at + 2], 16) for at in (1, 3, 5)] for name, value in COLORS.items()},
        "shapes": SHAPES,
    }


def write_texts(work: Path, examples: int = EXAMPLES) -> int:
    """Writes arrays and recipe; returns how many texts the talker has. Raises SpeakerError without a corpus."""
    from transformers.audio_utils import mel_filter_bank

    corpus, messages = Corpus.load(work), Messages(Prompts(work))
    folder = work / FOLDER
    folder.mkdir(exist_ok=True)
    filters = mel_filter_bank(201, 128, 0.0, 8000.0, 16_000, norm="slaney", mel_scale="slaney")
    arrays = {
        **talker_arrays(corpus, messages),
        **thinker_arrays(corpus, messages, examples),
        "filters": filters.T.astype(np.float32),
        "phones": np.array([0, *(sound.phone for sound in SOUNDS)], np.int16),
        "starts": np.array([False, *(sound.word_start for sound in SOUNDS)]),
    }
    np.savez_compressed(folder / TEXTS, **arrays)
    (folder / RECIPE).write_text(json.dumps(make_recipe(messages)), encoding="utf-8")
    return len(arrays["word_counts"])


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
