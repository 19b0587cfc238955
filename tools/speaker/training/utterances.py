"""What the talker reads and says, laid out on the device.

place         text side                         codec side    said
0 to p - 1    the thinker's rows of the prompt  nothing
p             the voice                         pad
p + 1 on      the rows of the reply, from the   start         first code
              prompt's last one to the reply's
              last but one; then end, padding   codes         the next one; behind the last, the end
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tools.speaker import files_of
from tools.speaker.training.decoder import TextThinker
from tools.speaker.training.stored import IGNORED, Order, Ragged, Stored, ceil_to

BUCKETS = (112, 144, 176, 208, 240, 272, 304, 336, 384, 448)  # places
LONGEST = 395  # codes
TASK_WEIGHT = 7  # replies to tasks are drawn so often as if there were so many of each
OTHER_PROMPT = 0.35  # of the texts follow a prompt that asks for something else
WRONG_CODES = 0.25  # at most this part of what is heard is wrong, in
WITH_WRONG_CODES = 0.6  # of the utterances, of which
NEAR = 0.6  # come from nearby
VOICE, END, PAD = 0, 1, 2  # rows behind those of the thinker


def words_of(
    codes: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], phone: npt.NDArray[Any], start: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns for each code which word of its utterance it says, from 0 on, and for each utterance how many words.

    Args:
        codes: of all utterances.
        ends: utterance `i` lies from `ends[i]` to `ends[i + 1]`.
        phone, start: of each code, its phone and whether a word begins there.
    """
    begins_word, phones = start[codes], phone[codes]
    rise = begins_word & ~np.r_[False, begins_word[:-1] & (phones[1:] == phones[:-1])]
    total, sizes = np.cumsum(rise), np.diff(ends)
    first = np.where(sizes > 0, np.minimum(ends[:-1], len(codes) - 1), 0)
    before = np.where(first > 0, total[first - 1], 0)
    words = total - np.repeat(before, sizes) - 1
    return words, np.where(sizes > 0, words[np.maximum(ends[1:] - 1, 0)], -1) + 1


def sources_of(place: Tensor, prompt: Tensor, reply: Tensor, rows: int) -> Tensor:
    """Returns which row each place reads: of the thinker's `rows`, or voice, end or padding behind them.

    Args:
        place: [B, L] or [1, L].
        prompt, reply: [B, 1], lengths in tokens.
        rows: how many the thinker gives.
    """
    k = place - prompt - 1
    ends = torch.where(k == reply, rows + END, rows + PAD)
    text = torch.where(k < 0, rows + VOICE, torch.where(k < reply, prompt + k, ends))
    return torch.where(place < prompt, place, text)


@dataclass(frozen=True)
class Lesson:
    """A batch for the talker.

    Args:
        ids: [B, N], prompts with their replies.
        prompt: [B, 1], lengths of the prompts.
        voice: [B], tokens.
        source: [B, L], see `sources_of`.
        code, has_code: [B, L], the codec side, and where there is one.
        target: [B, L], the codec token to be said, or -100.
        key: [B, L], which word of the reply is read, or -1; behind the last, the number of words.
        want: [B, 2, L], which word is being said, and the next one; -1 where that is not known.
    """

    ids: Tensor
    prompt: Tensor
    voice: Tensor
    source: Tensor
    code: Tensor
    has_code: Tensor
    target: Tensor
    key: Tensor
    want: Tensor


class Utterances:
    """All codes with their texts and prompts on the device, in buckets of similar length."""

    def __init__(self, stored: Stored, work: Path, places: int, rng: random.Random) -> None:
        self.stored, self.device = stored, stored.device
        codec, ids = stored.recipe["codec"], stored.recipe["ids"]
        self.pad, self.start, self.finish, self.sounds = (codec[n] for n in ("pad", "start", "end", "sounds"))
        self.voices: dict[str, int] = stored.recipe["voices"]
        self.ends = stored.tensor(np.array([ids["<tts_text_eos>"], ids["<tts_pad>"]]))
        self.messages, self.replies = stored.lists("messages"), stored.lists("replies")
        self.reply_words = stored.lists("reply_words", "replies")
        self.counts = stored.tensor(stored.host["word_counts"])
        phone = stored.tensor(stored.host["phones"].astype(np.int64))
        groups = torch.zeros(codec["vocab_size"], int(phone.max()) + 2, device=self.device)
        groups[torch.arange(len(phone), device=self.device), phone] = 1
        groups[len(phone) :, -1] = 1  # the end and its like
        self.groups, self.phone_of = groups, groups.argmax(1)
        self._load(work)
        self._fill(places, rng)

    def _load(self, work: Path) -> None:
        host, codes, sizes, texts, voices, words, right = self.stored.host, [], [], [], [], [], []
        for path in files_of(work, "codes"):
            with np.load(path) as data:
                own, ends = data["codes"].astype(np.int64), data["ends"]
                first, voice = int(data["first"]), str(data["voice"])
            said, count = words_of(own, ends, host["phones"], host["starts"])
            numbers = first + np.arange(len(ends) - 1)
            codes.append(own.astype(np.int16))
            words.append(said.astype(np.int16))
            sizes.append(np.diff(ends))
            texts.append(numbers)
            voices.append(np.full(len(numbers), self.voices[voice]))
            right.append(count == host["word_counts"][numbers])
        tensor, starts = self.stored.tensor, np.cumsum([0, *np.concatenate(sizes)])
        self.sizes, self.texts = np.concatenate(sizes), np.concatenate(texts)
        self.codes = Ragged(tensor(np.concatenate(codes)), tensor(starts), int(self.sizes.max()))
        self.words = Ragged(tensor(np.concatenate(words)), self.codes.starts, self.codes.longest)
        self.text, self.voice = tensor(self.texts), tensor(np.concatenate(voices))
        self.aligned = tensor(np.concatenate(right))
        self.right = float(np.concatenate(right).mean())

    def _fill(self, places: int, rng: random.Random) -> None:
        """Puts utterances into buckets, so many in a batch that it has about `places` places."""
        host, self.order = self.stored.host, Order(self.device, rng)
        self.rows: dict[int, int] = {}  # of the thinker, for each bucket
        prompt = np.diff(host["messages_starts"])[self.texts] + self.stored.wrapped
        size, whole = prompt + 2 + self.sizes, prompt + np.diff(host["replies_starts"])[self.texts] + 1
        good, task, shortest = (self.sizes > 0) & (self.sizes <= LONGEST), host["is_task"][self.texts], 0
        for bucket in BUCKETS:
            rows = min(bucket, ceil_to(bucket // 2 + 40, 8))
            fits = good & (size <= bucket) & (size > shortest) & (whole <= rows)
            shortest = bucket
            if fits.any():
                self.rows[bucket] = rows
                members = [np.flatnonzero(fits), *[np.flatnonzero(fits & task)] * (TASK_WEIGHT - 1)]
                self.order.put(bucket, np.concatenate(members), max(2, places // bucket))

    def batch(self, bucket: int, index: Tensor) -> Lesson:
        """Returns utterances [B] with their own prompts or others, and with some wrong codes to hear."""
        rows, device, text = self.rows[bucket], self.device, self.text[index]
        count, reply = self.codes.sizes(index), self.replies.sizes(text)
        message = self._prompts(text, bucket - 2 - count[:, 0], rows - 1 - reply[:, 0])
        at = torch.arange(rows, device=device)[None]
        ids, prompt = self.stored.prompt(at, self.messages, message)
        k = at - prompt
        said = torch.where(k < reply, self.replies.pick(text, k), torch.where(k == reply, self.stored.end, 0))
        ids = torch.where(k < 0, ids, said)
        place = torch.arange(bucket, device=device)[None]
        k = place - prompt - 1
        key = torch.where((k >= 0) & (k < reply), self.reply_words.pick(text, k), -1)
        key = torch.where(k == reply, self.counts[text][:, None].long(), key)
        c = place - prompt - 2
        inside, has_code = (c >= 0) & (c < count), (c >= -2) & (c < count)
        code = torch.where(inside, self.codes.pick(index, c), torch.where(c == -1, self.start, self.pad))
        target = torch.where(c == count - 1, self.finish, IGNORED)
        target = torch.where((c >= -1) & (c < count - 1), self.codes.pick(index, c + 1), target)
        heard = torch.where(inside, self.words.pick(index, c), -1)
        want = torch.stack([heard, heard + 1], 1)
        want = torch.where((self.aligned[index][:, None] & has_code & (c >= -1))[:, None], want, -1)
        return Lesson(
            ids=ids,
            prompt=prompt,
            voice=self.voice[index],
            source=sources_of(place, prompt, reply, rows),
            code=self._misheard(code, index, c, inside),
            has_code=has_code,
            target=target,
            key=key,
            want=want,
        )

    def _prompts(self, own: Tensor, room: Tensor, rows: Tensor) -> Tensor:
        """Returns which prompts stand before texts [B]; another one than its own only if it fits."""
        other = torch.randint(len(self.messages), own.shape, device=self.device)
        size = self.messages.sizes(other)[:, 0] + self.stored.wrapped
        taken = torch.rand(own.shape, device=self.device) < OTHER_PROMPT
        return torch.where((size <= room) & (size <= rows) & taken, other, own)

    def _misheard(self, code: Tensor, index: Tensor, place: Tensor, inside: Tensor) -> Tensor:
        """Returns the codes that are heard, some wrong: another of the same utterance near it, or any."""
        device, (b, length) = self.device, code.shape
        rate = WRONG_CODES * torch.rand(b, 1, device=device)
        rate = rate * (torch.rand(b, 1, device=device) < WITH_WRONG_CODES)
        wrong = inside & (torch.rand(b, length, device=device) < rate)
        near = (place + torch.randint(-4, 5, (b, length), device=device)).clamp(min=0)
        near = near.minimum(self.codes.sizes(index) - 1)
        any_code = torch.randint(1, self.sounds, (b, length), device=device)
        is_near = torch.rand(b, length, device=device) < NEAR
        return torch.where(wrong, torch.where(is_near, self.codes.pick(index, near), any_code), code)

    def rows_of(self, thinker: TextThinker, ids: Tensor, voice: Tensor) -> Tensor:
        """Returns [B, N + 3, 192]: the thinker's rows for ids [B, N], then voice, end and padding."""
        embed = thinker.model.embed_tokens
        embeds = embed(ids)
        rows = thinker.hidden(embeds).float() + embeds.float()
        behind = embed(torch.cat([voice[:, None], self.ends.expand(len(ids), -1)], 1))
        return torch.cat([rows, behind.float()], 1)
