"""The HiFT of CosyVoice 2, whose layers look to both sides: chunks overlap, and are faded into each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from omni_actors.engine.models.s3_vocoder.flow import FRAMES
from omni_actors.engine.models.s3_vocoder.hift import NOISE_SECONDS, SAMPLE_RATE, SAMPLES, Shaping, centered, mixed
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
    fading: torch.Tensor  # f32 [2 OVERLAP SAMPLES], up and down
    delay = behind = OVERLAP
    least = OVERLAP // FRAMES

    def __init__(self, weights: Weights, seed: int) -> None:
        super().__init__()
        count = weights.count("f0_predictor.condnet.")
        self.pitch = nn.ModuleList(weights.conv(f"f0_predictor.condnet.{2 * index}") for index in range(count))
        self.classify = weights.linear("f0_predictor.classifier")
        self.mix = weights.linear("m_source.l_linear")
        self.shaping = Shaping(weights, centered)
        fading = torch.hamming_window(2 * OVERLAP * SAMPLES, periodic=False)
        self.register_buffer("fading", fading, persistent=False)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(NOISE_SECONDS * SAMPLE_RATE, self.mix.in_features, generator=generator)
        self.register_buffer("noise", noise, persistent=False)

    @property
    def begun(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What an utterance begins with: mel frames, samples of the oscillator, and samples."""
        rows = self.noise.new_zeros
        return rows(self.shaping.before.in_channels, 0), rows(0), rows(0)

    def capture(self, sizes: Sequence[int], frames: Sequence[int]) -> None:
        """Nothing: where chunks are cut depends on the recording."""

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
        return mixed(self.mix, sines, pitch.squeeze(-1), self.noise, positions)

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
        samples, size = self.shaping(mel, source), OVERLAP * SAMPLES
        if kept:
            up, down = self.fading.split(size)
            samples = torch.cat([samples[:, :size] * up + sound * down, samples[:, size:]], 1)
        if last:
            return samples, mel, source, samples
        return samples[:, :-size], mel[..., -OVERLAP:], source[:, -size:], samples[:, -size:]
