"""The thinker: replies to texts, to what it hears and to what it sees, in conversations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tools.speaker.codec import VOICES, Voice, encode
from tools.speaker.conversations import IGNORED, About, Conversations, about_words, examples_of
from tools.speaker.layers import Graphs, Layers, attend_at_once, embedded
from tools.speaker.sound import SAMPLE_RATE, SAMPLES_PER_CODE, TEACHER_RATE, Wave, resample
from tools.speaker.teacher import speak
from tools.speaker.texts import THINKER_KINDS, Texts, heard_words, listed

OWN_AT_ONCE = 10  # lists that the checkpoint says
MEDIA = 0.45, 0.25  # of the questions have a sound, or a picture
WITH_MEDIA = 0.6  # of the batches have any: their steps are slow, and half as large


@torch.no_grad()
def own_lists(model: Any, rng: random.Random, voice: Voice, count: int) -> list[tuple[Wave, About]]:
    """Returns lists of words as DiT and BigVGAN say them, so that the checkpoint learns to hear itself."""
    lists, sounds = [heard_words(rng) for _ in range(count)], list[Wave]()
    fields = model.speaker_map[voice.name]
    cond, mel = fields["cond"].to(model.device), fields["ref_mel"].to(model.device)
    for first in range(0, count, OWN_AT_ONCE):
        # One behind the other, as the model hears only a second around each code.
        lines = [listed(words) for words in lists[first : first + OWN_AT_ONCE]]
        codes = [encode(said, voice)[0] for said in speak(lines, voice, wave=False)]
        whole = torch.from_numpy(np.concatenate(codes))[None].to(model.device)
        wave = model.token2wav(whole, conditioning=cond, reference_mel=mel).reshape(-1).cpu().numpy()
        ends = np.cumsum([len(one) for one in codes])[:-1] * SAMPLES_PER_CODE
        sounds += [resample(piece, SAMPLE_RATE, TEACHER_RATE) for piece in np.split(wave, ends)]
    return list(zip(sounds, map(about_words, lists), strict=True))


class Thinker:
    """Trains the thinker, ear and eye with it. The talker reads its hidden states, so it comes first."""

    rate, betas, decay = 1.2e-3, (0.9, 0.98), 0.05

    def __init__(self, model: Any, processor: Any, texts: Texts, batch: int, own: int) -> None:
        self.module, self.processor, self.batch = model.thinker, processor, batch
        attend_at_once(model.thinker)
        self.layers = Graphs(lambda: Layers(model.thinker.model))
        rng, each = random.Random(own), -(-own // len(VOICES))
        heard = [one for voice in VOICES.values() for one in own_lists(model, rng, voice, each)]
        self.conversations = Conversations(texts, THINKER_KINDS, MEDIA, heard)

    def batches(self, rng: random.Random) -> Iterator[dict[str, Tensor]]:
        """Yields conversations."""
        while True:
            media = rng.random() < WITH_MEDIA
            asked = self.conversations.draw(rng, max(1, self.batch // 2) if media else self.batch, media=media)
            yield examples_of(self.processor, self.module, asked)

    def loss(self, batch: dict[str, Tensor], done: float) -> Tensor:
        """Returns the mean loss of the replies' tokens."""
        hidden = self.layers(embedded(self.module, batch), batch["position_ids"], batch["attention_mask"].bool())[0]
        wanted = functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()
        at = (wanted != IGNORED).nonzero()[:, 0]
        logits = self.module.lm_head(hidden.flatten(0, 1).index_select(0, at))
        return functional.cross_entropy(logits, wanted[at])
