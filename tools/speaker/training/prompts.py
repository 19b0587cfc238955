"""Prompts and replies as token ids, in batches of similar length."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tools.speaker.corpus import SYSTEM, Corpus
from tools.speaker.layout import load_tokenizer
from tools.speaker.spoken import files_of

IGNORED = -100
POOL = 4000  # examples that are sorted by length before they are cut into batches
QUESTIONS = ("What do you hear?", "Which digits do you hear?", "Repeat what you hear.", "", "Write down what you hear.")
AUDIO = "<|AUDIO|>"
Ids = npt.NDArray[np.int64]


class Prompts:
    """The tokenizer, and the chat template around a user's message."""

    def __init__(self, work: Path) -> None:
        self.tokenizer = load_tokenizer(work / "model")
        self.end = int(self.tokenizer.convert_tokens_to_ids("<|im_end|>"))
        self.audio = int(self.tokenizer.convert_tokens_to_ids(AUDIO))

    def wrap(self, message: str, system: str = SYSTEM) -> str:
        """Returns the whole prompt of a user's message."""
        return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the token ids of each text."""
        return [np.array(ids, np.int64) for ids in self.tokenizer(list(texts))["input_ids"]] if texts else []


def collate(pairs: Sequence[tuple[Ids, Ids]], end: int) -> tuple[Tensor, Tensor]:
    """Returns ids [B, L] of prompts with their replies, and for each place the token that follows it.

    Only the tokens of the replies and their end are to be learned; the other targets are -100.
    """
    length = max(len(prompt) + len(reply) + 1 for prompt, reply in pairs)
    ids = np.zeros((len(pairs), length), np.int64)
    targets = np.full((len(pairs), length), IGNORED, np.int64)
    for row, (prompt, reply) in enumerate(pairs):
        whole = np.concatenate([prompt, reply, [end]])
        ids[row, : len(whole)] = whole
        targets[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    return torch.from_numpy(ids), torch.from_numpy(targets)


def by_length(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Returns indices in batches of similar sizes; a batch times its largest size is at most `room`, or one example."""
    batches: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=sizes.__getitem__):
        if batches and (len(batches[-1]) + 1) * sizes[index] <= room:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def text_batches(prompts: Prompts, corpus: Corpus, room: int, rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields batches of (ids, targets) without end, each of about `room` tokens."""
    while True:
        tasks = [corpus.example(rng) for _ in range(POOL)]
        asked = prompts.encode([prompts.wrap(task.prompt) for task in tasks])
        replies = prompts.encode([task.reply for task in tasks])
        batches = by_length([len(a) + len(b) + 1 for a, b in zip(asked, replies, strict=True)], room)
        rng.shuffle(batches)
        for batch in batches:
            yield collate([(asked[index], replies[index]) for index in batch], prompts.end)


@dataclass(frozen=True)
class Heard:
    """A batch of spoken digits: features [B, 128, F] with their mask [B, F], ids and targets as in `collate`."""

    features: Tensor
    mask: Tensor
    ids: Tensor
    targets: Tensor


class Digits:
    """Spoken digits at other speeds, loudnesses and places, with some noise, as prompts with audio."""

    def __init__(self, work: Path, prompts: Prompts) -> None:
        from transformers import WhisperFeatureExtractor

        self.prompts, self.items = prompts, list[tuple[npt.NDArray[np.int16], str]]()
        self.extractor: Any = WhisperFeatureExtractor(feature_size=128, sampling_rate=16_000, hop_length=160, n_fft=400)
        for path in files_of(work, "digits"):
            with np.load(path) as data:
                wave, ends, texts = data["wave"], data["ends"], data["texts"]
            for number, text in enumerate(texts):
                reply = ", ".join(str(text).rstrip(".").split()).capitalize() + "."
                self.items.append((wave[ends[number] : ends[number + 1]], reply))

    def batch(self, count: int, rng: random.Random) -> Heard:
        """Returns `count` strings of digits."""
        chosen = [rng.choice(self.items) for _ in range(count)]
        sounds = [self._vary(wave, rng) for wave, _ in chosen]
        made = self.extractor(
            sounds, sampling_rate=16_000, padding="longest", return_attention_mask=True, return_tensors="pt"
        )
        mask = made["attention_mask"]
        asked = []
        for frames in mask.sum(1).tolist():
            tokens = (((frames - 1) // 2 + 1) - 2) // 2 + 1
            asked.append(self.prompts.wrap(f"<|audio_bos|>{AUDIO * tokens}<|audio_eos|>{rng.choice(QUESTIONS)}"))
        pairs = zip(self.prompts.encode(asked), self.prompts.encode([reply for _, reply in chosen]), strict=True)
        ids, targets = collate(list(pairs), self.prompts.end)
        return Heard(made["input_features"], mask, ids, targets)

    def _vary(self, wave: npt.NDArray[np.int16], rng: random.Random) -> npt.NDArray[np.float32]:
        count = max(1, int(len(wave) * rng.uniform(0.88, 1.14)))
        faster = np.interp(np.linspace(0, len(wave) - 1, count), np.arange(len(wave)), wave / 32768)
        placed = np.pad(faster, (rng.randrange(4000), rng.randrange(4000))) * rng.uniform(0.3, 1.5)
        noise = np.random.default_rng(rng.randrange(2**32)).normal(0, 10 ** rng.uniform(-5, -2), len(placed))
        return (placed + noise).astype(np.float32)
