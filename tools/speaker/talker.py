"""The talker: the codes of replies, with its attention led to the word that is said.

place         text side                            codec side    said
0 to p - 1    the thinker's rows of the prompt     nothing
p             the voice                            pad
p + 1 on      the rows of the reply, then an end,  start         first code
              then padding                         codes         the next one; behind the last, the end

A row is the sum of a token's embedding and of the thinker's last hidden state there, as `generate()` has it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from tools.speaker.codec import SOUNDS, VOICES, Codes, Voice, encode
from tools.speaker.conversations import IGNORED, Conversations, examples_of
from tools.speaker.layers import LENGTHS, Graphs, Layers, attend_at_once, embedded
from tools.speaker.teacher import speak
from tools.speaker.texts import TALKER_KINDS, Texts

LONGEST, SHORTEST = 395, 12  # codes
GUIDED = (2, 4)  # layers whose heads 0 and 2 learn to look at the word that is said and at the next one
GUIDE_WEIGHT, GUIDE_FALL = 0.3, 0.8  # at first; how much of it is gone at the end
WRONG_CODES, WITH_WRONG_CODES = 0.25, 0.6  # at most this part of what is heard is wrong, in this part of the replies
STRANGE = 0.1  # of the prompts' messages are noise: what is said must not depend on sounds and pictures there
MEDIA, WITH_MEDIA = (0.2, 0.3), 0.1  # of the questions have a sound, or a picture; of the batches have any
VOICE, END, PAD = 0, 1, 2  # rows behind those of the thinker
SAID = 20_000  # replies whose codes a worker keeps
AT_ONCE = 4  # batches that are drawn together, from short replies to long ones
FILLS = {"target": IGNORED, "key": -1, "want": -1}


def words_of_codes(codes: Codes) -> list[int]:
    """Returns which word each code says, from 0 on; -1 before the first."""
    words, number, before = list[int](), -1, SOUNDS[0]
    for sound in (SOUNDS[code - 1] for code in codes):
        number += sound.word_start and not (before.word_start and before.phone == sound.phone)
        words.append(number)
        before = sound
    return words


def words_of_tokens(text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Returns which word of a text each token belongs to, or -1, and how many words there are."""
    which, words = [-1] * len(text), list(re.finditer(r"[A-Za-z']+|\d+", text))
    for number, word in enumerate(words):
        which[word.start() : word.end()] = [number] * len(word.group())
    return [max(which[begin:end], default=-1) for begin, end in spans], len(words)


def guide_loss(attention: Tensor, key: Tensor, want: Tensor) -> Tensor:
    """Returns -log of the share of attention that the tokens of the wanted words get, where there are any.

    Args:
        attention: [B, 2, L, L], of two heads.
        key: [B, L], which word stands at each place, or -1.
        want: [B, L, 2], which word each head is to look at, or -1.
    """
    want = want.transpose(1, 2)
    order = torch.ones(attention.shape[-2:], dtype=torch.bool, device=key.device).tril()
    good = (key[:, None, None, :] == want[..., None]) & (want[..., None] >= 0) & order
    share = (attention.float() * good).sum(-1).clamp(min=1e-6)
    return -share[good.any(-1)].log().sum() / good.any(-1).sum().clamp(min=1)


def padded(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the arrays of replies, all of one length, a multiple of `LENGTHS`."""
    longest, made = max(len(row["code"]) for row in rows), dict[str, Tensor]()
    for name, like in rows[0].items():
        empty = like.new_zeros(longest + -longest % LENGTHS if len(like) > 1 else 1, *like.shape[1:])
        values = [*(row[name] for row in rows), empty]
        made[name] = pad_sequence(values, batch_first=True, padding_value=FILLS.get(name, 0))[:-1]
    return made


class Talker:
    """Trains the talker on the rows of a trained thinker."""

    rate, betas, decay = 1.2e-3, (0.9, 0.98), 0.02

    def __init__(self, model: Any, processor: Any, texts: Texts, batch: int, own: int) -> None:
        self.module, self.thinker, self.batch = model.talker, model.thinker, batch
        attend_at_once(model.thinker)
        self.read, self.say = (
            Graphs(lambda: Layers(model.thinker.model)),
            Graphs(lambda: Layers(model.talker.model, GUIDED)),
        )
        self.processor, config = processor, model.config.talker_config
        self.conversations = Conversations(texts, TALKER_KINDS, MEDIA)
        self.media = [model.config.thinker_config.audio_token_id, model.config.thinker_config.image_token_id]
        self.voices = {name: int(fields["bos_token"]) for name, fields in model.speaker_map.items()}
        self.text_ends = [config.tts_text_end_token_id, config.tts_text_pad_token_id]
        self.said = dict[tuple[str, str], Codes]()  # by voice and reply
        self.pad, self.start, self.end = (getattr(config, f"tts_codec_{n}_token_id") for n in ("pad", "start", "end"))

    def batches(self, rng: random.Random) -> Iterator[dict[str, Tensor]]:
        """Yields replies to their prompts, with the teacher's codes."""
        while True:
            asked = self.conversations.draw(rng, AT_ONCE * self.batch, media=rng.random() < WITH_MEDIA)
            voice = rng.choice(list(VOICES.values()))
            replies = [one.turns[-1].wanted for one in asked]
            said = self.codes(replies, voice)
            fits = [number for number, codes in enumerate(said) if SHORTEST <= len(codes) <= LONGEST]
            fits.sort(key=lambda number: len(said[number]))  # replies of a batch are made equally long
            for first in range(0, len(fits) - self.batch + 1, self.batch):
                some = fits[first : first + self.batch]
                heard = examples_of(self.processor, self.thinker, [asked[number] for number in some])
                whole, sizes = heard["input_ids"].shape[1], heard["attention_mask"].sum(1).tolist()
                rows = [
                    self.row(rng, replies[number], said[number], size, whole, voice.name)
                    for number, size in zip(some, sizes, strict=True)
                ]
                yield padded(rows) | {f"thinker_{name}": value for name, value in heard.items() if name != "labels"}

    def codes(self, replies: Sequence[str], voice: Voice) -> list[Codes]:
        """Returns the teacher's codes of replies, and keeps them: many replies come again."""
        if len(self.said) > SAID:
            self.said.clear()
        new = [reply for reply in dict.fromkeys(replies) if (voice.name, reply) not in self.said]
        for reply, utterance in zip(new, speak(new, voice, wave=False), strict=True):
            self.said[voice.name, reply] = encode(utterance, voice)[0]
        return [self.said[voice.name, reply] for reply in replies]

    def row(self, rng: random.Random, reply: str, codes: Codes, size: int, whole: int, voice: str) -> dict[str, Tensor]:
        """Returns the arrays of one reply; negative numbers in `source` are rows behind the thinker's.

        Args:
            size: tokens of the prompt, the reply and its end.
            whole: the same with the padding before it.
        """
        made = self.processor.tokenizer(reply, return_offsets_mapping=True)
        words, count = words_of_tokens(reply, made["offset_mapping"])
        r, n = len(words), len(codes)
        p, begin = size - r - 1, whole - r - 1
        ends = [END - 3, *[PAD - 3] * max(0, n - r)]
        said, want = words_of_codes(codes), np.full((p + 2 + n, 2), -1)
        if said[-1] + 1 == count:  # as many words as in the text: this one and the next
            want[p + 2 :, 0] = said
            want[p + 1 :, 1] = [0, *(number + 1 for number in said)]
        near = np.clip(np.arange(n) + [rng.randint(-4, 4) for _ in codes], 0, n - 1)
        other = [rng.randint(1, len(SOUNDS)) if rng.random() < 0.4 else codes[at] for at in near]
        wrong = WRONG_CODES * rng.random() * (rng.random() < WITH_WRONG_CODES)
        heard = [bad if rng.random() < wrong else code for bad, code in zip(other, codes, strict=True)]
        arrays = {
            "prompt": [p],
            "voice": [self.voices[voice]],
            "source": [*range(whole - size, begin), VOICE - 3, *range(begin, whole - 1), *ends][: p + 2 + n],
            "code": [*[self.pad] * (p + 1), self.start, *heard],
            "target": [*[IGNORED] * (p + 1), *codes, self.end],
            "key": [*[-1] * (p + 1), *words, count, *[-1] * n][: p + 2 + n],
            "want": want,
        }
        return {name: torch.as_tensor(np.array(values, np.int64)) for name, values in arrays.items()}

    @torch.no_grad()
    def text_side(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns [B, L, 192]: the thinker's rows, voices and ends in their places."""
        given = {name.removeprefix("thinker_"): value for name, value in batch.items() if name.startswith("thinker_")}
        read, ids, source = embedded(self.thinker, given), given["input_ids"], batch["source"]
        media = torch.isin(ids, torch.tensor(self.media, device=ids.device))[..., None]
        last = self.read(read, given["position_ids"], given["attention_mask"].bool())[0]
        rows = last + read.masked_fill(media, 0)
        place = torch.arange(rows.shape[1], device=rows.device)[None, :, None]
        first = (rows.shape[1] - given["attention_mask"].sum(1))[:, None, None]
        noise = torch.rand(len(rows), 1, 1, device=rows.device) < STRANGE
        rows = torch.where(noise & (place < first + batch["prompt"][:, :, None]), 1.5 * torch.randn_like(rows), rows)
        ends = torch.tensor(self.text_ends, device=ids.device).expand(len(ids), -1)
        rows = torch.cat([rows, self.thinker.get_input_embeddings()(torch.cat([batch["voice"], ends], 1))], 1)
        index = torch.where(source < 0, rows.shape[1] + source, source)
        return torch.gather(rows, 1, index[..., None].expand(-1, -1, rows.shape[-1]))

    def loss(self, batch: dict[str, Tensor], done: float) -> Tensor:
        """Returns the loss of the codes and of the guided attention."""
        if "text_side" not in batch:  # the same when the batch comes again, so that what it is made of can go
            batch["text_side"] = self.text_side(batch)
            for name in [name for name in batch if name.startswith("thinker_")]:
                del batch[name]
        place = torch.arange(batch["code"].shape[1], device=batch["code"].device)[None]
        codec = self.module.get_input_embeddings()(batch["code"]) * (place >= batch["prompt"])[..., None]
        inputs = self.module.thinker_to_talker_proj(batch["text_side"] + codec)
        hidden, *attentions = self.say(inputs, place.expand(3, len(inputs), -1).contiguous())
        logits = self.module.codec_head(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), ignore_index=IGNORED)
        guides = [guide_loss(attention[:, :3:2], batch["key"], batch["want"]) for attention in attentions]
        return loss + GUIDE_WEIGHT * (1 - GUIDE_FALL * done) * torch.stack(guides).mean()
