"""Trains the talker on the hidden states of a frozen thinker: from a reply to the codes that say it.

The talker's sequence, for P prompt tokens, a reply of T tokens with its end, and codes c0 to c(n-1):

    place        text side                                             codec side     to be said
    0 .. P-1     the thinker's row of each prompt token                none
    P            the embedding of the voice's token                    pad
    P+1          the row of the reply's first token                    start          c0
    P+1+k        row k of the reply, after it "text end", then "pad"   c(k-1)         c(k), at last "end"

A row is the thinker's last hidden state plus the token's embedding. When speaking, the talker hears its own codes with
their mistakes; in training, a part of the codes that it hears are therefore what it would have said (scheduled
sampling).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tools.speaker.corpus import Corpus
from tools.speaker.layout import CODEC, TOKENS, token_ids
from tools.speaker.parts import read_part
from tools.speaker.spoken import SpokenText, spoken_codes
from tools.speaker.tasks import SAY
from tools.speaker.training.loop import Options, Trainer, autocast, has_state
from tools.speaker.training.prompts import IGNORED, Ids, Prompts, by_length

RATE, POSITIONS = 1.5e-3, 40_960
EMBEDDING_SIZE = 0.5
OWN_CODES = 0.25  # the largest part of codes that are the talker's own, reached after half of the time of a first run
OTHER_PROMPT = 0.4  # of the texts follow a prompt that has nothing to do with them, so that the prompt is not said
POOL = 6000


@dataclass(frozen=True)
class TalkerBatch:
    """What `collate` returns.

    Args:
        ids: [B, N], prompt and reply as the thinker reads them.
        source: [B, L], from which of the thinker's N rows each place comes; N is the voice, N+1 text end, N+2 pad.
        voice: [B], the token of each voice.
        code: [B, L], codec token on each place; meaningless where `has_code` is 0.
        has_code: [B, L], 1 where there is a codec side.
        target: [B, L], the codec token to be said, or -100.
    """

    ids: Tensor
    source: Tensor
    voice: Tensor
    code: Tensor
    has_code: Tensor
    target: Tensor

    def to(self, device: str) -> TalkerBatch:
        """Returns the same on a device."""
        return TalkerBatch(*(getattr(self, field.name).to(device) for field in fields(self)))


def collate(items: Sequence[tuple[Ids, Ids, SpokenText]], end: int) -> TalkerBatch:
    """Lays out prompts, replies and codes as the module's description says."""
    rows = max(len(prompt) + len(reply) + 1 for prompt, reply, _ in items)
    length = max(len(prompt) + 2 + len(said.codes) for prompt, _, said in items)
    shape = len(items), length
    ids = np.zeros((len(items), rows), np.int64)
    source, code = np.full(shape, rows + 2), np.zeros(shape, np.int64)
    has_code, target = np.zeros(shape, np.float32), np.full(shape, IGNORED)
    for row, (prompt, reply, said) in enumerate(items):
        p, text, codes = len(prompt), np.append(reply, end), said.codes
        ids[row, : p + len(text)] = np.concatenate([prompt, text])
        source[row, :p] = np.arange(p)
        source[row, p] = rows
        shown = min(len(text) - 1, length - p - 1)  # the row of the reply's end is never sent
        source[row, p + 1 : p + 1 + shown] = np.arange(p, p + shown)
        source[row, p + 1 + shown : p + 2 + shown] = rows + 1
        code[row, p : p + 2 + len(codes)] = np.concatenate([[CODEC.pad, CODEC.start], codes])
        has_code[row, p : p + 2 + len(codes)] = 1
        target[row, p + 1 : p + 2 + len(codes)] = np.append(codes, CODEC.end)
    voices = np.array([TOKENS.voices[said.voice] for _, _, said in items])
    return TalkerBatch(*(torch.from_numpy(array) for array in (ids, source, voices, code, has_code, target)))


def talker_batches(work: Path, room: int, rng: random.Random) -> Iterator[TalkerBatch]:
    """Yields batches without end; a text follows its own prompt, an echo, or one that asks for something else."""
    prompts, corpus, items = Prompts(work), Corpus.load(work), spoken_codes(work)
    texts = corpus.spoken_texts()
    asked_for: dict[str, list[str]] = {}
    for task in corpus.tasks:
        asked_for.setdefault(task.reply, []).append(task.prompt)
    while True:
        chosen = rng.sample(items, min(POOL, len(items)))
        messages = []
        for said in chosen:
            text = texts[said.text] if rng.random() >= OTHER_PROMPT else rng.choice(texts)
            own = asked_for.get(text, ())
            messages.append(rng.choice(own) if own and rng.random() < 0.7 else rng.choice(SAY).format(text))
        asked = prompts.encode([prompts.wrap(message) for message in messages])
        replies = prompts.encode([texts[said.text] for said in chosen])
        whole = list(zip(asked, replies, chosen, strict=True))
        batches = by_length([len(a) + 2 + len(said.codes) for a, _, said in whole], room)
        rng.shuffle(batches)
        yield from (collate([whole[index] for index in batch], prompts.end) for batch in batches)


class TalkerLoss:
    """The loss of a batch, with the frozen thinker that makes its text side."""

    def __init__(self, thinker: Any, talker: Any) -> None:
        self.thinker, self.talker, ids = thinker, talker, token_ids()
        self.text_end, self.text_pad = ids["<tts_text_eos>"], ids["<tts_pad>"]

    @torch.no_grad()
    def text_side(self, batch: TalkerBatch) -> Tensor:
        """Returns [B, L, 192]: the thinker's rows, voices and ends in their places."""
        embed = self.thinker.get_input_embeddings()
        embeds = embed(batch.ids)
        rows = self.thinker.model(inputs_embeds=embeds, use_cache=False).last_hidden_state.float() + embeds.float()
        ends = torch.tensor([self.text_end, self.text_pad], device=rows.device).expand(len(rows), -1)
        rows = torch.cat([rows, embed(torch.cat([batch.voice[:, None], ends], 1)).float()], 1)
        return torch.gather(rows, 1, batch.source[..., None].expand(-1, -1, rows.shape[-1]))

    def logits(self, text: Tensor, code: Tensor, has_code: Tensor) -> Tensor:
        """Returns [B, L, vocabulary] for a text side and codec tokens."""
        embeds = text + self.talker.get_input_embeddings()(code) * has_code[..., None]
        hidden = self.talker.model(
            inputs_embeds=self.talker.thinker_to_talker_proj(embeds), use_cache=False
        ).last_hidden_state
        logits: Tensor = self.talker.codec_head(hidden).float()
        return logits

    def __call__(self, batch: TalkerBatch, own: float) -> Tensor:
        """Return the mean loss, where a part `own` of the codes that are heard are the talker's own choice."""
        text, code = self.text_side(batch), batch.code
        if own > 0:
            code = self.with_own_codes(batch, text, own)
        logits = self.logits(text, code, batch.has_code)
        said = batch.target >= 0
        return functional.cross_entropy(logits[said], batch.target[said])

    @torch.no_grad()
    def with_own_codes(self, batch: TalkerBatch, text: Tensor, own: float) -> Tensor:
        """Returns the codes that are heard, a part of them replaced by what the talker would have said there."""
        said = self.logits(text, batch.code, batch.has_code).argmax(-1).roll(1, 1)
        is_code = (batch.target >= 0).roll(1, 1)  # a place hears what the place before it was to say
        is_code[:, 0] = False
        taken = is_code & (batch.has_code > 0) & (said < CODEC.sounds) & (said > 0)
        taken &= torch.rand(taken.shape, device=taken.device) < own
        return torch.where(taken, said, batch.code)


def train_talker(options: Options, config: Any) -> Path:
    """Trains for the given time; returns the path of the part. Raises SpeakerError without a trained thinker."""
    from transformers import Qwen2_5OmniTalkerForConditionalGeneration, Qwen2_5OmniThinkerForConditionalGeneration

    thinker: Any = Qwen2_5OmniThinkerForConditionalGeneration(config.thinker_config)
    trained = options.work / "parts"
    if options.start is not None and not (trained / "thinker.safetensors").exists():
        trained = options.start
    thinker.load_state_dict(read_part(trained, "thinker"))
    thinker.to(options.device).eval().requires_grad_(False)
    talker: Any = Qwen2_5OmniTalkerForConditionalGeneration(config.talker_config)
    continued = has_state(options, "talker")
    if not continued:
        with torch.no_grad():
            talker.get_input_embeddings().weight.normal_(std=EMBEDDING_SIZE)
    trainer = Trainer("talker", talker, options, peak=RATE)
    rng = random.Random(options.seed + trainer.updates)
    batches = talker_batches(options.work, max(1, int(POSITIONS * options.scale)), rng)
    loss_of = TalkerLoss(thinker, talker)
    while trainer.running():
        own = OWN_CODES * (1.0 if continued else min(1.0, 2 * trainer.clock.done()))
        with autocast(options.device):
            loss = loss_of(next(batches).to(options.device), own)
        trainer.step(loss)
        trainer.report(loss=float(loss.detach()), own=own)
    return trainer.save()
