"""BigVGAN: from mels to waves, first by distances of spectra, then also against discriminators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.speaker.dit import Speech, piece
from tools.speaker.layers import Graphs
from tools.speaker.sound import log_mel
from tools.speaker.texts import Texts

CODES, PIECES = 30, 2  # of a piece: 0.6 s; from each utterance
ALONE = 0.25  # of the training lets the discriminators learn, but does not listen to them
RESOLUTIONS = (256, 512, 1024, 2048)
SPECTRAL_WEIGHT, LOUDNESS_WEIGHT, FEATURE_WEIGHT = 15.0, 10.0, 2.0
WIDTH, JUDGE_RATE = 24, 2e-4


def spectrum(wave: Tensor, size: int) -> Tensor:
    """Returns magnitudes [B, size / 2 + 1, frames] of waves [B, samples]."""
    window = torch.hann_window(size, device=wave.device)
    value = torch.stft(wave.float(), size, size // 4, window=window, return_complex=True)
    return torch.sqrt(value.real.square() + value.imag.square() + 1e-8)


def spectral_distance(made: Tensor, truth: Tensor) -> Tensor:
    """Returns the distance of log mels, and of magnitudes at other resolutions."""
    distance = 2 * functional.l1_loss(log_mel(made), log_mel(truth))
    for size in RESOLUTIONS:
        one, other = spectrum(made, size), spectrum(truth, size)
        distance = distance + 0.5 * functional.l1_loss(torch.log(one + 1e-4), torch.log(other + 1e-4))
        distance = distance + 0.5 * (one - other).norm() / other.norm().clamp(min=1e-3)
    return distance


class Discriminator(nn.Module):
    """Looks at a wave's spectrum of one resolution."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        inner = [nn.Conv2d(WIDTH, WIDTH, (3, 7), (1, 2), (1, 3)) for _ in range(3)]
        self.layers = nn.ModuleList([nn.Conv2d(1, WIDTH, (3, 7), padding=(1, 3)), *inner])
        self.last = nn.Conv2d(WIDTH, 1, 3, padding=1)

    def forward(self, wave: Tensor) -> list[Tensor]:
        """Return the features of waves [B, samples], then the verdict."""
        image, features = torch.log(spectrum(wave, self.size)).transpose(1, 2)[:, None], list[Tensor]()
        for layer in self.layers:
            image = functional.leaky_relu(layer(image), 0.1)
            features.append(image)
        return [*features, self.last(image)]


class Unclamped(nn.Module):
    """BigVGAN without the clamp at its end."""

    def __init__(self, maker: Any) -> None:
        super().__init__()
        self.maker = maker

    def forward(self, spectrum: Tensor) -> tuple[Tensor]:
        """Return waves [B, samples] of spectra [B, 80, frames] as `process_mel_spectrogram` makes them of log mels."""
        maker, hidden = self.maker, self.maker.conv_pre(spectrum)
        blocks = maker.num_residual_blocks
        for index in range(maker.num_upsample_layers):
            hidden = maker.ups[index][0](hidden)
            hidden = sum(block(hidden) for block in maker.resblocks[index * blocks : (index + 1) * blocks]) / blocks
        return (maker.conv_post(maker.activation_post(hidden))[:, 0].float(),)


class Vocoder:
    """Trains BigVGAN on the teacher's speech."""

    rate, betas, decay = 1e-3, (0.8, 0.99), 0.0

    def __init__(self, model: Any, processor: Any, texts: Texts, batch: int, own: int) -> None:
        self.module, self.speech, self.batch = model.token2wav.code2wav_bigvgan_model, Speech(texts), batch
        self.maker = Graphs(lambda: Unclamped(self.module))
        self.judges = nn.ModuleList(Discriminator(size) for size in RESOLUTIONS[1:]).to(model.device)
        self.learner = torch.optim.AdamW(self.judges.parameters(), lr=JUDGE_RATE, betas=self.betas, weight_decay=0.0)

    def batches(self, rng: random.Random) -> Iterator[dict[str, Tensor]]:
        """Yields pieces of 0.6 s."""
        while True:
            said = self.speech.draw(rng, -(-self.batch // PIECES), CODES)[1]
            waves = [piece(rng, one, CODES)[1] for one in said for _ in range(PIECES)]
            yield {"wave": torch.stack([rng.uniform(0.5, 1.2) * wave for wave in waves[: self.batch]])}

    def verdicts(self, judge: nn.Module, wave: Tensor) -> list[Tensor]:
        """Returns a discriminator's features, then its verdict; on a GPU by products in bfloat16."""
        with torch.autocast(wave.device.type, torch.bfloat16, enabled=wave.is_cuda):
            return [value.float() for value in judge(wave)]

    def loss(self, batch: dict[str, Tensor], done: float) -> Tensor:
        """Returns distances of spectra, and later what the discriminators say, which take a step of their own."""
        truth = batch["wave"]
        (made,) = self.maker(self.module.process_mel_spectrogram(log_mel(truth)))
        loss = SPECTRAL_WEIGHT * spectral_distance(made, truth)
        loss = loss + LOUDNESS_WEIGHT * (made.abs() - 1).clamp(min=0).mean()
        said = [self.verdicts(judge, torch.cat([truth, made.detach()])) for judge in self.judges]
        pairs = [verdict[-1].chunk(2) for verdict in said]
        torch.stack([(1 - real).square().mean() + fake.square().mean() for real, fake in pairs]).sum().backward()
        nn.utils.clip_grad_norm_(self.judges.parameters(), 10.0)
        self.learner.step()
        self.learner.zero_grad()
        if done <= ALONE:
            return loss
        self.judges.requires_grad_(False)
        for judge, verdict in zip(self.judges, said, strict=True):
            fakes = self.verdicts(judge, made)
            loss = loss + (1 - fakes[-1]).square().mean()
            for fake, both in zip(fakes[:-1], verdict[:-1], strict=True):
                loss = loss + FEATURE_WEIGHT * functional.l1_loss(fake, both.detach().chunk(2)[0])
        self.judges.requires_grad_(True)
        return loss
