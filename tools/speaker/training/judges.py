"""What the vocoder is trained against: distances of spectra, and discriminators of periods and spectra."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.speaker.sound import log_mel

PERIODS, SIZES, WIDTH = (2, 3, 5, 7, 11), (512, 1024, 2048), 24
RESOLUTIONS = (256, 512, 2048)


def spectrum(wave: Tensor, size: int) -> Tensor:
    """Returns magnitudes [B, size / 2 + 1, frames] of waves [B, samples]."""
    window = torch.hann_window(size, device=wave.device)
    value = torch.stft(wave.float(), size, size // 4, window=window, return_complex=True)
    return torch.sqrt(value.real.square() + value.imag.square() + 1e-8)


def spectral_distance(made: Tensor, truth: Tensor) -> Tensor:
    """Returns the distance of log mels, and of magnitudes at three other resolutions."""
    distance = 2 * functional.l1_loss(log_mel(made), log_mel(truth))
    for size in RESOLUTIONS:
        one, other = spectrum(made, size), spectrum(truth, size)
        distance = distance + 0.5 * functional.l1_loss(torch.log(one + 1e-4), torch.log(other + 1e-4))
        distance = distance + 0.5 * (one - other).norm() / other.norm().clamp(min=1e-3)
    return distance


class _Layers(nn.Module):
    """Convolutions whose every output counts as a feature; the last one is the verdict."""

    def __init__(self, layers: list[nn.Conv2d], last: nn.Conv2d) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(layers), last

    def forward(self, image: Tensor) -> list[Tensor]:
        """Return the features of an image [B, 1, H, W], then the verdict."""
        features = []
        for layer in self.layers:
            image = functional.leaky_relu(layer(image), 0.1)
            features.append(image)
        return [*features, self.last(image)]


class PeriodJudge(nn.Module):
    """Looks at a wave as lines of `period` samples."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.period = period
        widths = [1, WIDTH, 2 * WIDTH, 4 * WIDTH, 4 * WIDTH]
        layers = [nn.Conv2d(before, after, (5, 1), (3, 1), (2, 0)) for before, after in pairwise(widths)]
        self.body = _Layers(layers, nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0)))

    def forward(self, wave: Tensor) -> list[Tensor]:
        """Return features and verdict of waves [B, samples]."""
        whole = wave.shape[1] // self.period * self.period
        features: list[Tensor] = self.body(wave[:, :whole].reshape(len(wave), 1, -1, self.period))
        return features


class SpectrumJudge(nn.Module):
    """Looks at a wave's spectrum of one resolution."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        first = nn.Conv2d(1, WIDTH, (3, 7), padding=(1, 3))
        inner = [nn.Conv2d(WIDTH, WIDTH, (3, 7), (1, 2), (1, 3)) for _ in range(3)]
        last = nn.Conv2d(WIDTH, 1, 3, padding=1)
        self.body = _Layers([first, *inner, nn.Conv2d(WIDTH, WIDTH, 3, padding=1)], last)

    def forward(self, wave: Tensor) -> list[Tensor]:
        """Return features and verdict of waves [B, samples]."""
        with torch.autocast(wave.device.type, enabled=False):
            image = torch.log(spectrum(wave, self.size)).transpose(1, 2)[:, None]
        features: list[Tensor] = self.body(image)
        return features


class Judges(nn.ModuleList):
    """All discriminators."""

    def __init__(self) -> None:
        super().__init__([*(PeriodJudge(period) for period in PERIODS), *(SpectrumJudge(size) for size in SIZES)])

    def own_loss(self, made: Tensor, truth: Tensor) -> Tensor:
        """Returns how badly they tell made waves [B, samples] from true ones."""
        loss = made.new_zeros(())
        for judge in self:
            real, fake = judge(truth)[-1].float(), judge(made.detach())[-1].float()
            loss = loss + (1 - real).square().mean() + fake.square().mean()
        return loss

    def loss_of(self, made: Tensor, truth: Tensor) -> Tensor:
        """Returns what the maker of a wave is to lower: verdicts, and distances of features."""
        loss = made.new_zeros(())
        for judge in self:
            fake = judge(made)
            with torch.no_grad():
                real = judge(truth)
            loss = loss + (1 - fake[-1].float()).square().mean()
            for one, other in zip(fake[:-1], real[:-1], strict=True):
                loss = loss + 2 * functional.l1_loss(one.float(), other.float())
        return loss
