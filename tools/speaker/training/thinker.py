"""Trains the thinker: replies to texts, and digits that it hears."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tools.speaker.corpus import Corpus
from tools.speaker.training.loop import Options, Trainer, autocast, has_state
from tools.speaker.training.prompts import Digits, Heard, Prompts, text_batches

RATE, DECAY = 2e-3, 0.05
TOKENS, STRINGS = 24_576, 40  # of a batch
EMBEDDING_SIZE = 0.25  # the talker reads embeddings beside hidden states, which are about that large
LISTEN_AFTER = 0.25  # of the time: what is heard means something once words do


def reply_loss(thinker: Any, embeds: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean loss of the tokens that are to be learned, for embeddings [B, L, 192]."""
    hidden = thinker.model(inputs_embeds=embeds, use_cache=False).last_hidden_state
    learned = targets >= 0
    return functional.cross_entropy(thinker.lm_head(hidden[learned]).float(), targets[learned])


def heard_embeds(thinker: Any, heard: Heard, audio: int) -> Tensor:
    """Returns the embeddings of prompts with audio, in which sounds stand in the place of their tokens."""
    sound = thinker.get_audio_features(heard.features, feature_attention_mask=heard.mask)
    sound = sound if isinstance(sound, Tensor) else sound.last_hidden_state
    embeds: Tensor = thinker.get_input_embeddings()(heard.ids)
    return embeds.masked_scatter((heard.ids == audio)[..., None], sound.to(embeds.dtype))


def train_thinker(options: Options, config: Any) -> Path:
    """Trains for the given time; returns the path of the part."""
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    thinker: Any = Qwen2_5OmniThinkerForConditionalGeneration(config.thinker_config)
    if not has_state(options, "thinker"):
        with torch.no_grad():
            thinker.get_input_embeddings().weight.normal_(std=EMBEDDING_SIZE)
    trainer = Trainer("thinker", thinker, options, peak=RATE, decay=DECAY, average=0.998)
    rng, prompts = random.Random(options.seed + trainer.updates), Prompts(options.work)
    batches = text_batches(prompts, Corpus.load(options.work), max(1, int(TOKENS * options.scale)), rng)
    digits, strings = Digits(options.work, prompts), max(1, int(STRINGS * options.scale))
    device = options.device
    for step in count():
        if not trainer.running():
            break
        ids, targets = (value.to(device) for value in next(batches))
        with autocast(device):
            loss = reply_loss(thinker, thinker.get_input_embeddings()(ids), targets)
            figures = {"loss": float(loss.detach()) if step % 100 == 0 else 0.0}
            if step % 2 and (trainer.updates > 10_000 or trainer.clock.done() > LISTEN_AFTER):
                batch = digits.batch(strings, rng)
                heard = Heard(*(getattr(batch, name).to(device) for name in ("features", "mask", "ids", "targets")))
                loss = loss + 0.5 * reply_loss(thinker, heard_embeds(thinker, heard, prompts.audio), heard.targets)
        trainer.step(loss)
        trainer.report(**figures)
    return trainer.save()
