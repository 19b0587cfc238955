"""What the thinker hears: spoken lists at other speeds, loudnesses and places, with noise, as prompts with audio."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tools.speaker import files_of
from tools.speaker.training.senses import CHUNK, Thinker
from tools.speaker.training.stored import Order, Ragged, Stored, ceil_to, with_reply

BATCH = 128
HOP, CHUNK_SAMPLES = 160, 160 * CHUNK
LONGEST = {1: 25_000, 2: 52_000, 3: 82_000}  # samples that fit into so many chunks at each speed
HELD_OUT_EVERY = 40  # each 40th list is never trained on
ASKED_FOR_SUM = 0.5  # of the lists that have one


@dataclass(frozen=True)
class Heard:
    """A batch of prompts with audio.

    Args:
        ids, targets: [B, L].
        mel: [B, 128, 200 C].
        frames: [B], of the mel that mean something.
        tokens: [B, 1], of the prompt that stand for sound.
        has_sum: [B], whether the list is of two digits.
    """

    ids: Tensor
    targets: Tensor
    mel: Tensor
    frames: Tensor
    tokens: Tensor
    has_sum: Tensor


class Hearing:
    """All waves at 16 kHz on the device."""

    def __init__(self, stored: Stored, work: Path, scale: float, rng: random.Random) -> None:
        waves, numbers, own = [], list[int](), list[bool]()
        for path in (*files_of(work, "heard"), *files_of(work, "own", needed=False)):
            with np.load(path) as data:
                wave, ends, first = data["wave"], data["ends"], int(data["first"])
            waves += [wave[begin:end] for begin, end in pairwise(ends)]
            numbers += range(first, first + len(ends) - 1)
            own += [path.name.startswith("own")] * (len(ends) - 1)
        sizes = np.array([len(wave) for wave in waves])
        self.stored, self.device = stored, stored.device
        self.waves = Ragged(
            stored.tensor(np.concatenate(waves)), stored.tensor(np.cumsum([0, *sizes])), int(sizes.max(initial=0))
        )
        self.numbers = stored.tensor(np.array(numbers))
        held_out = np.array(numbers) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        fits, is_own = held_out & (sizes < LONGEST[2]), np.array(own)
        self.held_out = {"heard": np.flatnonzero(fits & ~is_own), "own": np.flatnonzero(fits & is_own)}
        self.order, shortest = Order(stored.device, rng), 0
        for chunks, longest in LONGEST.items():
            members = np.flatnonzero((sizes >= shortest) & (sizes < longest) & ~held_out)
            if len(members):
                self.order.put(chunks, members, max(2, int(BATCH * scale)))
            shortest = longest
        self.head = stored.tensor(np.array(stored.recipe["audio_head"]))
        self.tails, self.lists, self.sums = (stored.table(name) for name in ("audio_tails", "lists", "sums"))
        self.filters = stored.tensor(stored.host["filters"])
        self.window = torch.hann_window(400, device=stored.device)

    def mels(self, waves: Tensor) -> Tensor:
        """Returns Whisper's log mels [B, 128, samples / 160] of waves [B, samples]."""
        spectrum = torch.stft(waves, 400, HOP, 400, self.window, return_complex=True)[..., :-1]
        power = spectrum.real.square() + spectrum.imag.square()
        mel = torch.log10(torch.clamp(self.filters @ power, min=1e-10))
        mel = torch.maximum(mel, mel.amax((1, 2), keepdim=True) - 8.0)
        return (mel + 4.0) / 4.0

    def batch(self, chunks: int, index: Tensor, *, vary: bool = True, ask_sum: bool | None = None) -> Heard:
        """Returns the prompts of some waves.

        Args:
            chunks: of 2 s, that the longest of them fills.
            index: [B], which waves.
            vary: speed, loudness, place, noise and color of the voice; false for the wave as it is.
            ask_sum: whether to ask for sums where there are any; None for half of them.
        """
        b, device = len(index), self.device
        sound, total = self._varied(chunks, index) if vary else self._plain(chunks, index)
        frames = torch.div(total.long(), HOP, rounding_mode="floor")[:, 0]  # as the processor counts a single sound
        tokens = (((frames - 1) // 2 + 1 - 2) // 2 + 1)[:, None]
        number, plain = self.numbers[index], self.stored.recipe["audio_questions"]
        has_sum = self.sums.sizes(number)[:, 0] > 0
        ask = has_sum & (torch.rand(b, device=device) < ASKED_FOR_SUM) if ask_sum is None else has_sum & ask_sum
        others = torch.randint(plain, len(self.tails), (b,), device=device)
        question = torch.where(ask, others, torch.randint(0, plain, (b,), device=device))
        if not vary:
            question = torch.where(ask, plain, 0)
        head = len(self.head)
        size = ceil_to(head + 50 * chunks + self.tails.longest + 28, 8)
        at = torch.arange(size, device=device)[None]
        ids = torch.where(at < head, self.head[at.clamp(max=head - 1)], self.stored.recipe["audio"])
        place = at - head - tokens
        ids = torch.where(place >= 0, self.tails.pick(question, place), ids)
        place = place - self.tails.sizes(question)
        reply = torch.where(ask[:, None], self.sums.pick(number, place), self.lists.pick(number, place))
        count = torch.where(ask[:, None], self.sums.sizes(number), self.lists.sizes(number))
        ids, targets = with_reply(ids, place, reply, count, self.stored.end)
        mel = self.mels(sound)
        if vary:
            mel = self._colored(mel)
        return Heard(ids, targets, mel, frames, tokens, has_sum)

    def _between(self, count: int, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, device=self.device)

    def _plain(self, chunks: int, index: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(CHUNK_SAMPLES * chunks, device=self.device)[None]
        count = self.waves.sizes(index)
        return self.waves.pick(index, place) / 32768 * (place < count - 1), count.float()

    def _varied(self, chunks: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns waves [B, 32000 C] with silence around them, and their lengths [B, 1]."""
        b, room, count = len(index), CHUNK_SAMPLES * chunks, self.waves.sizes(index).float()
        speed = self._between(b, 0.88, 1.14)
        length = (count / speed).floor()
        before = torch.minimum(self._between(b, 0, 4000), room - length - 200).clamp(min=0).floor()
        after = torch.minimum(self._between(b, 0, 3000), room - length - before - 100).clamp(min=0).floor()
        time = (torch.arange(room, device=self.device)[None] - before) * speed
        inside = (time >= 0) & (time < count - 1)
        low = time.floor().clamp(min=0).minimum(count - 2)
        part = (time - low).clamp(0, 1)
        one, other = (self.waves.pick(index, low.long() + shift).float() for shift in (0, 1))
        sound = (one * (1 - part) + other * part) / 32768 * inside
        total = before + length + after
        noise = torch.randn(b, room, device=self.device) * 10 ** self._between(b, -5, -2)
        return (sound * self._between(b, 0.3, 1.5) + noise) * (
            torch.arange(room, device=self.device)[None] < total
        ), total

    def _colored(self, mel: Tensor) -> Tensor:
        """Returns mels in the color of other voices and vocoders, so that it hears itself, too."""
        b, device = len(mel), self.device
        knots = 0.12 * torch.randn(b, 1, 9, device=device) * (torch.rand(b, 1, 1, device=device) < 0.7)
        mel = mel + functional.interpolate(knots, size=128, mode="linear", align_corners=True).transpose(1, 2)
        return mel + 0.04 * torch.randn_like(mel) * torch.rand(b, 1, 1, device=device)


def embeds_with_sound(thinker: Thinker, heard: Heard, head: int) -> Tensor:
    """Returns embeddings [B, L, 192] in which sounds stand behind the first `head` tokens."""
    sound = thinker.audio_tower(heard.mel, heard.frames)
    embeds: Tensor = thinker.model.embed_tokens(heard.ids)
    place = torch.arange(embeds.shape[1], device=embeds.device)[None] - head
    inside = (place >= 0) & (place < heard.tokens)
    index = place.clamp(0, sound.shape[1] - 1)[..., None].expand(len(embeds), -1, sound.shape[-1])
    return torch.where(inside[..., None], torch.gather(sound, 1, index), embeds)
