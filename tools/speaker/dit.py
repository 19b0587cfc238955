"""The DiT: from codes, a voice and a piece of its sound to mels, by flow matching."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.speaker.codec import VOICES, Codes, encode
from tools.speaker.layers import Graphs
from tools.speaker.sound import FRAMES_PER_CODE, SAMPLES_PER_CODE, Wave, log_mel, teacher_wave
from tools.speaker.teacher import speak
from tools.speaker.texts import Texts

LONGEST, SHORTEST, STEP = 130, 20, 10  # codes of a piece, and what they are a multiple of
LONGEST_TEXT = 110  # letters
KEPT, REUSED = 300, 8  # utterances of a voice; batches that use one, about
REFERENCE = 300  # frames of a voice's own sound: 3 s
WITHOUT_CONDITION = 0.12  # of the examples have none, for classifier-free guidance


class Speech:
    """What the teacher says: the last utterances of each voice, a few of which are new in each batch."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.said = {name: deque[tuple[Codes, Wave]](maxlen=KEPT) for name in VOICES}

    def draw(self, rng: random.Random, count: int, codes: int) -> tuple[int, list[tuple[Codes, Wave]]]:
        """Returns the number of a voice, and the codes and waves of what it says, all of at least `codes` codes."""
        voice, fits = rng.choice(list(VOICES.values())), list[tuple[Codes, Wave]]()
        pool, fresh = self.said[voice.name], max(1, count // REUSED)
        while fresh or len(fits) < count:
            lines = [self.texts.repeated(rng)[:LONGEST_TEXT] for _ in range(fresh or count)]
            for said in speak(lines, voice, wave=True):
                made, start = encode(said, voice)
                if len(made) >= SHORTEST:
                    pool.append((made, teacher_wave(said.samples, start, len(made))))
            fits, fresh = [one for one in pool if len(one[0]) >= codes], 0
        return list(VOICES).index(voice.name), rng.sample(fits, count)


def piece(rng: random.Random, said: tuple[Codes, Wave], codes: int) -> tuple[Tensor, Tensor]:
    """Returns `codes` codes from anywhere in an utterance, and their wave."""
    begin = rng.randint(0, len(said[0]) - codes)
    wave = said[1][begin * SAMPLES_PER_CODE : (begin + codes) * SAMPLES_PER_CODE]
    return torch.from_numpy(said[0][begin : begin + codes]), torch.from_numpy(wave).float()


class Velocity(nn.Module):
    """The DiT, of a mel with noise [B, frames, 80], a voice's sound and vector, codes [B, frames / 2] and times [B]."""

    def __init__(self, dit: nn.Module) -> None:
        super().__init__()
        self.dit = dit

    def forward(self, noisy: Tensor, reference: Tensor, vector: Tensor, codes: Tensor, time: Tensor) -> tuple[Tensor]:
        """Return the guessed velocity [B, frames, 80]."""
        given = {"hidden_states": noisy, "condition_vector": reference, "speaker_embedding": vector}
        return (self.dit(**given, quantized_code=codes, time_step=time, apply_cfg=False),)


class Dit:
    """Trains the DiT on the teacher's speech; the voices' vectors are those of the checkpoint."""

    rate, betas, decay = 1.5e-3, (0.9, 0.99), 0.01

    def __init__(self, model: Any, processor: Any, texts: Texts, batch: int, own: int) -> None:
        self.module, self.speech, self.batch = model.token2wav.code2wav_dit_model, Speech(texts), batch
        self.velocity = Graphs(lambda: Velocity(self.module))
        self.vectors = torch.cat([model.speaker_map[name]["cond"] for name in VOICES]).to(model.device)

    def batches(self, rng: random.Random) -> Iterator[dict[str, Tensor]]:
        """Yields pieces of one voice and of one length."""
        while True:
            codes = rng.randrange(SHORTEST, LONGEST + 1, STEP)
            number, said = self.speech.draw(rng, self.batch, codes)
            pieces = [piece(rng, one, codes) for one in said]
            whole = torch.cat([log_mel(torch.from_numpy(wave)[None])[0].T for _, wave in said])
            whole = whole.repeat(-(-REFERENCE // len(whole)), 1)
            begins = [rng.randint(0, len(whole) - REFERENCE) for _ in said]
            yield {
                "codes": torch.stack([one for one, _ in pieces]),
                "mel": log_mel(torch.stack([wave for _, wave in pieces])).transpose(1, 2),
                "reference": torch.stack([whole[begin : begin + REFERENCE] for begin in begins]),
                "voice": torch.full((len(said),), number),
            }

    def loss(self, batch: dict[str, Tensor], done: float) -> Tensor:
        """Returns how far the guessed velocity is from the way between noise and mel."""
        mel, count = batch["mel"], len(batch["mel"])
        bare = torch.rand(count, device=mel.device) < WITHOUT_CONDITION
        vector = self.vectors[batch["voice"]].masked_fill(bare[:, None], 0)[:, None]
        time, noise = torch.rand(count, device=mel.device), torch.randn_like(mel)
        way = mel - noise
        (guess,) = self.velocity(
            noise + time[:, None, None] * way,
            batch["reference"].masked_fill(bare[:, None, None], 0),
            vector.repeat(1, FRAMES_PER_CODE * batch["codes"].shape[1], 1),
            batch["codes"].masked_fill(bare[:, None], 0),
            time,
        )
        return functional.mse_loss(guess.float(), way)
