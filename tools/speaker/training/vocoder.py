"""Trains BigVGAN: from mels to waves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tools.speaker.sound import log_mel
from tools.speaker.training.acoustic import Acoustic
from tools.speaker.training.judges import Judges, spectral_distance
from tools.speaker.training.loop import Options, Trainer, autocast, has_state

RATE, JUDGE_RATE = 1e-3, 2e-4
PIECES, CODES = 40, 30  # of a batch; pieces of 0.6 s
ALONE = 0.4  # of a first run's time without discriminators
SPECTRAL_WEIGHT, LOUDNESS_WEIGHT = 15.0, 10.0


def wave_of(generator: Any, mel: Tensor) -> Tensor:
    """Returns waves [B, samples] of log mels [B, 80, frames]: BigVGAN without the clamp at its end."""
    hidden = generator.conv_pre(generator.process_mel_spectrogram(mel))
    blocks = generator.num_residual_blocks
    for index in range(generator.num_upsample_layers):
        hidden = generator.ups[index][0](hidden)
        hidden = sum(block(hidden) for block in generator.resblocks[index * blocks : (index + 1) * blocks]) / blocks
    wave: Tensor = generator.conv_post(generator.activation_post(hidden))[:, 0]
    return wave


def train_vocoder(options: Options, config: Any) -> Path:
    """Trains for the given time; returns the path of the part."""
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

    generator: Any = Qwen2_5OmniToken2WavBigVGANModel._from_config(config.token2wav_config.bigvgan_config)
    for module in generator.modules():
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            module.reset_parameters()
    continued = has_state(options, "vocoder")
    trainer = Trainer("vocoder", generator, options, peak=RATE, clip=20.0, betas=(0.8, 0.99), decay=0.0)
    judges = Judges().to(options.device)
    learner = torch.optim.AdamW(judges.parameters(), lr=JUDGE_RATE, betas=(0.8, 0.99), weight_decay=0.0)
    if "judges" in trainer.others:
        judges.load_state_dict(trainer.others["judges"])
        learner.load_state_dict(trainer.others["learner"])
    acoustic = Acoustic(options.work, options.device)
    rng, count = np.random.default_rng(options.seed + trainer.updates), max(1, int(PIECES * options.scale))
    codes = min(CODES, int(acoustic.sizes.max()))
    while trainer.running():
        begins, _ = acoustic.pieces(rng, count, codes)
        truth = acoustic.waves_of(begins, codes)
        truth = truth * torch.empty(count, 1, device=truth.device).uniform_(0.5, 1.2)
        mel = log_mel(truth)
        made = wave_of(generator, mel)
        loss = SPECTRAL_WEIGHT * spectral_distance(made, truth)
        loss = loss + LOUDNESS_WEIGHT * (made.abs() - 1).clamp(min=0).mean()
        if continued or trainer.clock.done() > ALONE:
            loss = loss + judged(judges, learner, made, truth, options.device)
            trainer.others = {"judges": judges.state_dict(), "learner": learner.state_dict()}
        trainer.step(loss)
        trainer.report(loss=float(loss.detach()))
    return trainer.save()


def judged(judges: Judges, learner: torch.optim.Optimizer, made: Tensor, truth: Tensor, device: str) -> Tensor:
    """Lets the discriminators take a step, then returns what they say of the made waves."""
    with autocast(device):
        own = judges.own_loss(made, truth)
    own.backward()
    if bool(torch.isfinite(nn.utils.clip_grad_norm_(judges.parameters(), 10.0))):
        learner.step()
    learner.zero_grad(set_to_none=True)
    judges.requires_grad_(False)
    with autocast(device):
        loss = judges.loss_of(made, truth)
    judges.requires_grad_(True)
    return loss
