"""Trains the talker: the codes of replies, with its attention led to the word that is said."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tools.speaker.parts import read_part
from tools.speaker.training.decoder import Attention, Talker, TextThinker
from tools.speaker.training.free_running import phone_errors
from tools.speaker.training.learner import Figures, Learner, Weights
from tools.speaker.training.loop import Options
from tools.speaker.training.stored import Stored
from tools.speaker.training.utterances import Lesson, Utterances

RATE, DECAY, AVERAGE = 1.2e-3, 0.02, 0.9993
PLACES = 40_960  # of a batch
FEWEST_PLACES = 400
GUIDED = (2, 4)  # layers whose heads 0 and 2 learn to look at the word that is said and at the next one
HEADS = slice(0, 3, 2)  # a list would be copied from the host, which a graph cannot do
GUIDE_WEIGHT, GUIDE_FALL = 0.3, 0.8  # at first; how much of it is gone at the end
PHONE_WEIGHT = 0.5
STRANGE = 0.08  # of a prompt's rows are noise, as large as
STRANGE_SIZE = 1.5
GROWN = (0, 1, 3, 5, 7)  # where the layers of a talker of five go in one of eight


def guide_loss(seen: Sequence[tuple[Tensor, Tensor]], key: Tensor, want: Tensor) -> Tensor:
    """Returns -log of the share of attention that the tokens of the wanted words get, where there are any.

    Args:
        seen: queries and keys [B, heads, L, dim] of some layers.
        key: [B, L], which word stands at each place.
        want: [B, 2, L], which word the first and the second head are to look at, or -1.
    """
    losses, size = [], key.shape[1]
    order = torch.ones(size, size, dtype=torch.bool, device=key.device).tril()
    good = (key[:, None, None, :] == want[..., None]) & (want[..., None] >= 0) & order
    use = good.any(-1)
    for q, k in seen:
        scores = (q[:, HEADS] @ k[:, HEADS].transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        whole = scores.masked_fill(~order, -1e4).logsumexp(-1)
        part = scores.masked_fill(~good, -1e4).logsumexp(-1)
        losses.append(((whole - part) * use).sum() / use.sum().clamp(min=1))
    return torch.stack(losses).mean()


def grown(weights: Weights, talker: Talker) -> Weights:
    """Returns weights of fewer layers in their places; layers between them begin as if they were not there."""
    own, layers = talker.state_dict(), len(talker.model.layers)
    had = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    places = GROWN if (had, layers) == (5, 8) else tuple(range(had))
    found = {}
    for name, value in weights.items():
        parts = name.split(".")
        if name.startswith("model.layers."):
            parts[2] = str(places[int(parts[2])])
        found[".".join(parts)] = value
    for layer in set(range(layers)) - set(places):
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            own[f"model.layers.{layer}.{name}"].zero_()
    return own | found


class TalkerLoss:
    """The loss of a batch, with the frozen thinker that makes its text side."""

    def __init__(self, thinker: TextThinker, talker: Talker, feed: Utterances, dtype: torch.dtype) -> None:
        self.thinker, self.talker, self.feed, self.dtype = thinker, talker, feed, dtype
        self.guide = torch.full((), GUIDE_WEIGHT, device=feed.device)  # a tensor, since graphs read it
        numbers = [number for number in GUIDED if number < len(talker.model.layers)]
        attentions = (talker.get_submodule(f"model.layers.{number}.self_attn") for number in numbers)
        self.guided = [attention for attention in attentions if isinstance(attention, Attention)]

    @torch.no_grad()
    def text_side(self, lesson: Lesson) -> Tensor:
        """Returns [B, L, 192]: the thinker's rows, voices and ends in their places.

        Some rows of the prompt's message are noise: sounds and pictures there look like nothing that the talker has
        read, and what is said must not depend on them.
        """
        stored, rows = self.feed.stored, self.feed.rows_of(self.thinker, lesson.ids, lesson.voice)
        place = torch.arange(rows.shape[1], device=rows.device)[None, :, None]
        message = place < lesson.prompt[:, :, None] - len(stored.suffix)
        strange = message & (place >= len(stored.prefix))
        strange = strange & (torch.rand(len(rows), 1, 1, device=rows.device) < STRANGE)
        rows = torch.where(strange, STRANGE_SIZE * torch.randn_like(rows), rows).to(self.dtype)
        return torch.gather(rows, 1, lesson.source[..., None].expand(-1, -1, rows.shape[-1]))

    def __call__(self, lesson: Lesson) -> tuple[Tensor, Figures]:
        """Return the loss of codes, phones and attention, with figures."""
        text, seen = self.text_side(lesson), list[tuple[Tensor, Tensor]]()
        for attention in self.guided:
            attention.seen = seen
        hidden = self.talker.hidden(text, lesson.code, lesson.has_code.to(self.dtype))
        for attention in self.guided:
            attention.seen = None
        logits = self.talker.codec_head(hidden).float().flatten(0, 1)
        target = lesson.target.flatten()
        learned, wanted = target >= 0, target.clamp(min=0)
        total = learned.sum().clamp(min=1)
        logs = logits.log_softmax(-1)
        exact = -torch.gather(logs, 1, wanted[:, None])[:, 0]
        alike = torch.gather(logs.exp() @ self.feed.groups, 1, self.feed.phone_of[wanted][:, None])[:, 0]
        codes = (exact * learned).sum() / total
        phones = (-alike.clamp(min=1e-6).log() * learned).sum() / total
        loss = codes + PHONE_WEIGHT * phones
        right = ((logits.argmax(-1) == target) & learned).sum() / total
        figures = {"codes": codes, "phones": phones, "right": right}
        if seen:
            some = max(1, len(text) // 2)  # half of them do
            pairs = [(q[:some], k[:some]) for q, k in seen]
            figures["guide"] = guide_loss(pairs, lesson.key[:some], lesson.want[:some])
            loss = loss + self.guide * figures["guide"]
        return loss, figures


def trained_thinker(stored: Stored, options: Options) -> TextThinker:
    """Returns the text part of the thinker in `parts/`, or else of `--from`; raises SpeakerError without one."""
    folder = options.work / "parts"
    if options.start is not None and not (folder / "thinker.safetensors").exists():
        folder = options.start
    weights, thinker = read_part(folder, "thinker"), TextThinker(stored.sizes["text"])
    thinker.load_state_dict({name: weights[name] for name in thinker.state_dict()})
    return thinker.to(options.device).eval().requires_grad_(False)


def train_talker(options: Options) -> Path:
    """Trains for the given time; returns the path of the part. Raises SpeakerError without a trained thinker."""
    stored, rng = Stored(options.work, options.device), random.Random(options.seed + 1)
    thinker, talker = trained_thinker(stored, options), Talker(stored.sizes["talker"])
    feed = Utterances(stored, options.work, max(FEWEST_PLACES, int(PLACES * options.scale)), rng)
    learner = Learner(
        "talker", talker, options, peak=RATE, decay=DECAY, average=AVERAGE, adapt=lambda weights: grown(weights, talker)
    )
    learner.report(f"{len(feed.codes)} utterances, words found in {feed.right:.3f}")
    loss_of = TalkerLoss(thinker, talker, feed, learner.dtype)
    judged = Talker(stored.sizes["talker"]).to(options.device).eval()

    def save() -> Path:
        path = learner.save()
        judged.load_state_dict(learner.flat.averaged())
        errors = phone_errors(thinker, judged, feed, few=options.device == "cpu")
        learner.report(f"held out, free-running phone errors: {errors}")
        return path

    while learner.running():
        bucket, index = feed.order.draw()
        loss_of.guide.fill_(GUIDE_WEIGHT * (1 - GUIDE_FALL * learner.clock.done()))

        def loss(bucket: int = bucket, index: Tensor = index) -> tuple[Tensor, Figures]:
            return loss_of(feed.batch(bucket, index))

        learner.add(bucket, loss)
        learner.step()
        if learner.save_due():
            save()
    return save()
