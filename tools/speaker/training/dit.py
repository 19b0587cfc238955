"""Trains the DiT: from codes, a voice and a piece of its sound to mels, by flow matching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.speaker import SpeakerError
from tools.speaker.codec import VOICES
from tools.speaker.layout import SPEAKER_DIM
from tools.speaker.parts import read_voices
from tools.speaker.training.acoustic import Acoustic
from tools.speaker.training.loop import Options, Trainer, autocast, has_state

RATE, FRAMES = 1.5e-3, 24_000
LONGEST, SHORTEST = 130, 15  # codes of a piece
REFERENCE = 150  # codes of a voice's own sound: 3 s
WITHOUT_CONDITION = 0.12  # of the examples have none, for classifier-free guidance
REFERENCES_PER_VOICE = 4  # in a batch


def initialise(dit: Any) -> None:
    """Gives a new DiT weights with which every block begins as the identity."""
    for module in dit.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv1d):
            module.reset_parameters()
    nn.init.normal_(dit.text_embed.codec_embed.weight)
    for last in (*(block.attn_norm.linear for block in dit.transformer_blocks), dit.norm_out.linear, dit.proj_out):
        nn.init.zeros_(last.weight)


def new_voices(acoustic: Acoustic, mels: Tensor) -> dict[str, dict[str, Tensor]]:
    """Returns a fixed random vector for each voice, and 3 s of its longest utterance."""
    voices = {}
    for number, name in enumerate(VOICES):
        vector = torch.randn(1, SPEAKER_DIM, generator=torch.Generator().manual_seed(1000 + number))
        longest = int(np.argmax(np.where(acoustic.voices == number, acoustic.sizes, 0)))
        length = min(REFERENCE, int(acoustic.sizes[longest]))
        begin = acoustic.starts[longest : longest + 1]
        voices[name] = {"cond": vector, "ref_mel": acoustic.mels_of(mels, begin, length).cpu()}
    return voices


def known_voices(options: Options) -> dict[str, dict[str, Tensor]] | None:
    """Returns the voices of an earlier run or of the weights to begin from; None if there are none."""
    for folder in (options.work / "parts", options.start):
        if folder is not None:
            try:
                return read_voices(folder)
            except SpeakerError:
                continue
    return None


class FlowLoss:
    """The loss of random pieces: how far the guessed velocity is from the way between noise and mel."""

    def __init__(self, dit: Any, acoustic: Acoustic, mels: Tensor, vectors: Tensor, seed: int) -> None:
        self.dit, self.acoustic, self.mels, self.vectors = dit, acoustic, mels, vectors
        self.rng = np.random.default_rng(seed)

    def __call__(self, frames: int) -> Tensor:
        """Return the mean loss of a batch of about that many frames, of pieces of one length."""
        rng, acoustic = self.rng, self.acoustic
        longest = min(LONGEST, int(acoustic.sizes.max()))
        codes = int(rng.integers(min(SHORTEST, longest), longest + 1))
        count = max(1, frames // (2 * codes))
        begins, voices = acoustic.pieces(rng, count, codes)
        mel = acoustic.mels_of(self.mels, begins, codes)
        device = mel.device
        unconditional = torch.rand(count, device=device) < WITHOUT_CONDITION
        said = acoustic.gather(acoustic.codes, begins, 1, codes).masked_fill(unconditional[:, None], 0)
        number = torch.from_numpy(voices).to(device)
        speaker = self.vectors[number].masked_fill(unconditional[:, None], 0)[:, None].expand(-1, 2 * codes, -1)
        reference = self._references(voices).masked_fill(unconditional[:, None, None], 0)
        time, noise = torch.rand(count, device=device), torch.randn_like(mel)
        way = mel - noise
        guess = self.dit(
            hidden_states=noise + time[:, None, None] * way,
            condition_vector=reference,
            speaker_embedding=speaker,
            quantized_code=said,
            time_step=time,
            apply_cfg=False,
        )
        return functional.mse_loss(guess.float(), way)

    def _references(self, voices: Any) -> Tensor:
        """Returns for each example a piece [2 * codes, 80] of its voice; a few pieces are shared by the batch."""
        length = min(
            REFERENCE, *(int(self.acoustic.sizes[self.acoustic.voices == n].max()) for n in range(len(VOICES)))
        )
        pools = [
            self.acoustic.mels_of(
                self.mels, self.acoustic.pieces(self.rng, REFERENCES_PER_VOICE, length, number)[0], length
            )
            for number in range(len(VOICES))
        ]
        pick = voices * REFERENCES_PER_VOICE + self.rng.integers(0, REFERENCES_PER_VOICE, len(voices))
        return torch.cat(pools)[torch.from_numpy(pick).to(self.mels.device)]


def train_dit(options: Options, config: Any) -> Path:
    """Trains for the given time; returns the path of the part, in which the voices are, too."""
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavDiTModel

    dit: Any = Qwen2_5OmniToken2WavDiTModel._from_config(config.token2wav_config.dit_config, attn_implementation="sdpa")
    acoustic = Acoustic(options.work, options.device)
    mels = acoustic.mels()
    if not has_state(options, "dit"):
        initialise(dit)
        with torch.no_grad():
            dit.proj_out.bias.copy_(mels.float().mean(0))
    voices = known_voices(options) or new_voices(acoustic, mels)
    trainer = Trainer("dit", dit, options, peak=RATE, betas=(0.9, 0.99), decay=0.01, average=0.9995)
    trainer.voices = voices
    vectors = torch.cat([voices[name]["cond"] for name in VOICES]).to(options.device)
    loss_of = FlowLoss(dit, acoustic, mels, vectors, options.seed + trainer.updates)
    while trainer.running():
        with autocast(options.device):
            loss = loss_of(max(1, int(FRAMES * options.scale)))
        trainer.step(loss)
        trainer.report(loss=float(loss.detach()))
    return trainer.save()
