"""The HiFT of CosyVoice 2, whose layers look to both sides: chunks overlap, and are faded into each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from omni_actors.engine.models.s3_vocoder.flow import FRAMES
from omni_actors.engine.models.s3_vocoder.hift import (
    AMPLITUDE,
    LOUDEST,
    NOISE,
    NOISE_SECONDS,
    PEAK,
    SAMPLE_RATE,
    SAMPLES,
    SLOPE,
    VOICED,
    Residual,
    centered,
    rates_of,
)
from omni_actors.engine.models.s3_vocoder.weights import Weights

OVERLAP = 8  # mel frames


class OverlapHift(nn.Module):
    """Mel frames [batch, mels, frames] to samples, `SAMPLES` for each frame, in float32; see `Hift`.

    Attributes:
        delay: mel frames that the sound waits for.
        behind: mel frames that are kept besides.
        least: tokens of a first chunk; fewer have no frames to overlap.
    """

    noise: torch.Tensor  # f32 [samples, harmonics]
    window: torch.Tensor  # f32 [samples], of the spectrum
    fading: torch.Tensor  # f32 [2 OVERLAP SAMPLES], up and down
    delay = behind = OVERLAP
    least = OVERLAP // FRAMES

    def __init__(self, weights: Weights, seed: int) -> None:
        super().__init__()
        count = weights.count("f0_predictor.condnet.")
        self.pitch = nn.ModuleList(weights.conv(f"f0_predictor.condnet.{2 * index}") for index in range(count))
        self.classify = weights.linear("f0_predictor.classifier")
        self.mix, self.before = weights.linear("m_source.l_linear"), weights.conv("conv_pre")
        self.after = weights.conv("conv_post")
        self.bins = self.after.out_channels // 2
        self.hop = (self.bins - 1) // 2
        self.strides, rates = rates_of(weights, SAMPLES // self.hop)
        self.widening = nn.ModuleList(weights.widening(f"ups.{index}", rate) for index, rate in enumerate(rates))
        self.narrowing = nn.ModuleList(
            weights.conv(f"source_downs.{index}", stride=each) for index, each in enumerate(self.strides)
        )
        self.sources = nn.ModuleList(
            Residual(weights, f"source_resblocks.{index}", centered) for index in range(len(rates))
        )
        self.shapes = nn.ModuleList(
            Residual(weights, f"resblocks.{index}", centered) for index in range(weights.count("resblocks."))
        )
        weights.done()
        self.register_buffer("window", torch.hann_window(2 * (self.bins - 1)), persistent=False)
        fading = torch.hamming_window(2 * OVERLAP * SAMPLES, periodic=False)
        self.register_buffer("fading", fading, persistent=False)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(NOISE_SECONDS * SAMPLE_RATE, self.mix.in_features, generator=generator)
        self.register_buffer("noise", noise, persistent=False)

    @property
    def begun(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What an utterance begins with: mel frames, samples of the oscillator, and samples."""
        rows = self.noise.new_zeros
        return rows(self.before.in_channels, 0), rows(0), rows(0)

    def source(self, mel: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The oscillator's samples [batch, samples].

        Args:
            positions: i64 [batch], frames of the utterance before these.
        """
        hidden = mel
        for conv in self.pitch:
            hidden = F.elu(centered(conv, hidden))
        pitch = self.classify(hidden.transpose(1, 2)).abs()
        harmonics = torch.arange(1, self.mix.in_features + 1, device=mel.device)
        # In float64: the phase adds up.
        cycles = (pitch.double() * harmonics / SAMPLE_RATE).remainder(1).cumsum(1) * SAMPLES
        cycles = F.interpolate(cycles.transpose(1, 2), scale_factor=SAMPLES, mode="linear").transpose(1, 2)
        sines = (cycles.remainder(1) * (2 * math.pi)).sin().float()
        voiced = (pitch > VOICED).float().repeat_interleave(SAMPLES, 1)
        places = positions[:, None] * SAMPLES + torch.arange(sines.shape[1], device=mel.device)
        noise = self.noise[places.remainder(len(self.noise))]
        loudness = voiced * NOISE + (1 - voiced) * AMPLITUDE / 3
        mixed: torch.Tensor = self.mix(sines * AMPLITUDE * voiced + loudness * noise).tanh().squeeze(-1)
        return mixed

    def forward(self, mel: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Samples [batch, time] of mel frames and the oscillator's samples."""
        size, kernels = 2 * (self.bins - 1), len(self.shapes) // len(self.widening)
        spectrum = torch.stft(source, size, self.hop, size, self.window, return_complex=True)
        wave, hidden = torch.cat([spectrum.real, spectrum.imag], 1), centered(self.before, mel)
        for stage, (wide, narrow) in enumerate(zip(self.widening, self.narrowing, strict=True)):
            hidden = wide(F.leaky_relu(hidden, SLOPE))
            if stage == len(self.widening) - 1:
                hidden = F.pad(hidden, (1, 0), mode="reflect")
            around = self.strides[stage] // 2
            hidden = hidden + self.sources[stage](narrow(F.pad(wave, (around, around))))
            shapes = self.shapes[kernels * stage : kernels * (stage + 1)]
            hidden = torch.stack([shape(hidden) for shape in shapes]).mean(0)
        magnitude, phase = centered(self.after, F.leaky_relu(hidden)).split(self.bins, 1)
        shaped = torch.polar(magnitude.exp().clamp(max=LOUDEST), phase.sin())
        return torch.istft(shaped, size, self.hop, size, self.window).clamp(-PEAK, PEAK)

    def stream(
        self,
        mel: torch.Tensor,
        source: torch.Tensor,
        sound: torch.Tensor,
        kept: int,
        received: Sequence[int],
        *,
        last: bool,
    ) -> tuple[torch.Tensor, ...]:
        """See `Hift.stream`; instead of the phase it keeps samples that are faded into the next ones."""
        places = torch.tensor([before - kept for before in received], device=mel.device)
        source = torch.cat([source, self.source(mel, places)[:, source.shape[1] :]], 1)
        samples, size = self(mel, source), OVERLAP * SAMPLES
        if kept:
            up, down = self.fading.split(size)
            samples = torch.cat([samples[:, :size] * up + sound * down, samples[:, size:]], 1)
        if last:
            return samples, mel, source, samples
        return samples[:, :-size], mel[..., -OVERLAP:], source[:, -size:], samples[:, -size:]
