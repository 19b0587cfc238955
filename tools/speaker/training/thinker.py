"""Trains the thinker: replies to texts, what it hears, what it sees."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tools.speaker.training.decoder import TextThinker
from tools.speaker.training.free_running import exact_replies
from tools.speaker.training.hearing import Hearing, embeds_with_sound
from tools.speaker.training.learner import Figures, Learner
from tools.speaker.training.loop import Options
from tools.speaker.training.seeing import GRIDS, Seeing, embeds_with_picture
from tools.speaker.training.senses import Thinker
from tools.speaker.training.stored import IGNORED, Order, Stored, with_reply

RATE, DECAY, AVERAGE = 1.2e-3, 0.05, 0.998
TOKENS = 49_152  # of a batch of texts
STEP, SHORTEST = 16, 48  # tokens between buckets; tokens of the first
MEDIA_WEIGHT = 0.5
SEE_EVERY = 3  # steps; at the others it hears


class Texts:
    """Prompts with replies on the device, in buckets of similar length."""

    def __init__(self, stored: Stored, scale: float, rng: random.Random) -> None:
        self.stored = stored
        self.asked, self.answers = stored.lists("asked"), stored.lists("answers")
        sizes = np.diff(stored.host["asked_starts"]) + np.diff(stored.host["answers_starts"]) + stored.wrapped + 1
        buckets = np.maximum(-(-sizes // STEP) * STEP, SHORTEST)
        self.order = Order(stored.device, rng)
        for bucket in map(int, np.unique(buckets)):
            self.order.put(bucket, np.flatnonzero(buckets == bucket), max(2, int(TOKENS * scale) // bucket))

    def batch(self, length: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ids and targets [B, length]."""
        place = torch.arange(length, device=self.stored.device)[None]
        ids, prompt = self.stored.prompt(place, self.asked, index)
        place = place - prompt
        return with_reply(ids, place, self.answers.pick(index, place), self.answers.sizes(index), self.stored.end)


def reply_loss(
    thinker: TextThinker, embeds: Tensor, targets: Tensor, places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the mean loss of the tokens that are to be learned, and how many of them are right."""
    logits = thinker.lm_head(thinker.hidden(embeds, places)).float()
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    learned = targets >= 0
    right = ((logits.argmax(-1) == targets) & learned).sum() / learned.sum().clamp(min=1)
    return loss, right


class ThinkerLosses:
    """The three losses, each as a function for `Learner.add`."""

    def __init__(self, thinker: Thinker, texts: Texts, hearing: Hearing, seeing: Seeing) -> None:
        self.thinker, self.texts, self.hearing, self.seeing = thinker, texts, hearing, seeing

    def text(self, length: int, index: Tensor) -> Callable[[], tuple[Tensor, Figures]]:
        """Returns the loss of texts in a bucket."""

        def loss_of() -> tuple[Tensor, Figures]:
            ids, targets = self.texts.batch(length, index)
            loss, right = reply_loss(self.thinker, self.thinker.model.embed_tokens(ids), targets)
            return loss, {"text": loss, "right": right}

        return loss_of

    def hear(self, chunks: int, index: Tensor) -> Callable[[], tuple[Tensor, Figures]]:
        """Returns the loss of what is heard."""

        def loss_of() -> tuple[Tensor, Figures]:
            heard = self.hearing.batch(chunks, index)
            embeds = embeds_with_sound(self.thinker, heard, len(self.hearing.head))
            loss, right = reply_loss(self.thinker, embeds, heard.targets)
            return MEDIA_WEIGHT * loss, {"hear": loss, "heard": right}

        return loss_of

    def see(self, h: int, w: int, count: int) -> Callable[[], tuple[Tensor, Figures]]:
        """Returns the loss of what is seen."""

        def loss_of() -> tuple[Tensor, Figures]:
            seen = self.seeing.batch(h, w, count)
            embeds = embeds_with_picture(self.thinker, seen, len(self.seeing.head))
            loss, right = reply_loss(self.thinker, embeds, seen.targets, seen.places)
            return MEDIA_WEIGHT * loss, {"see": loss, "seen": right}

        return loss_of

    @torch.no_grad()
    def held_out(self, few: bool) -> str:
        """Returns how many answers are exact: texts in their groups, sounds and pictures that it has not trained on."""
        thinker, stored = self.thinker, self.texts.stored
        text = exact_replies(thinker, stored.held_out["thinker"][: 8 if few else None], stored.end, stored.device, few)
        for name, members in self.hearing.held_out.items():
            for ask_sum in (False, True) if len(members) else ():
                heard = self.hearing.batch(2, stored.tensor(members[: 8 if few else 160]), vary=False, ask_sum=ask_sum)
                logits = thinker.lm_head(thinker.hidden(embeds_with_sound(thinker, heard, len(self.hearing.head))))
                right = _all_right(logits, heard.targets)[heard.has_sum | (not ask_sum)]
                text += f", {name}{' sums' if ask_sum else ''} {int(right.sum())} of {len(right)}"
        count = 4 if few else 48
        for h, w in ((8, 8),) if few else ((8, 8), (16, 16), (5, 9)):
            seen = self.seeing.batch(h, w, count, question=0)
            embeds = embeds_with_picture(thinker, seen, len(self.seeing.head))
            right = _all_right(thinker.lm_head(thinker.hidden(embeds, seen.places)), seen.targets)
            text += f", seen {h} by {w} {int(right.sum())} of {count}"
        return text


def _all_right(logits: Tensor, targets: Tensor) -> Tensor:
    return ((logits.argmax(-1) == targets) | (targets < 0)).all(1)


def train_thinker(options: Options) -> Path:
    """Trains for the given time; returns the path of the part."""
    stored, rng = Stored(options.work, options.device), random.Random(options.seed)
    learner = Learner("thinker", thinker := Thinker(stored.sizes), options, peak=RATE, decay=DECAY, average=AVERAGE)
    texts = Texts(stored, options.scale, rng)
    hearing, seeing = Hearing(stored, options.work, options.scale, rng), Seeing(stored)
    losses = ThinkerLosses(thinker, texts, hearing, seeing)
    judged = Thinker(stored.sizes).to(options.device).eval()

    def save() -> Path:
        path = learner.save()
        judged.load_state_dict(learner.flat.averaged())
        right = ThinkerLosses(judged, texts, hearing, seeing).held_out(few=options.device == "cpu")
        learner.report(f"held out, exact: {right}")
        return path

    while learner.running():
        length, index = texts.order.draw()
        learner.add(("text", length), losses.text(length, index))
        if learner.clock.steps % SEE_EVERY:
            chunks, index = hearing.order.draw()
            # A Fourier transform had better not be captured.
            learner.add(("heard", chunks), losses.hear(chunks, index), graph=False)
        else:
            h, w, count = rng.choice(GRIDS)
            learner.add(("seen", h, w), losses.see(h, w, max(2, int(count * options.scale))))
        learner.step()
        if learner.save_due():
            save()
    return save()
