"""The convolutions of the codec decoder, which continue where the chunk before ended. All take [batch, channels, time].

Parameters have the names of the published checkpoints.
"""

from __future__ import annotations

import torch
from torch import nn

from omni_actors.engine.models.codec_decoder.context import Context

DILATIONS = (1, 3, 9)


class CausalConv(nn.Module):
    """A convolution whose output depends on the past only: as many samples out as in."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation, groups=groups)
        self._past = (kernel - 1) * dilation

    def forward(self, chunk: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, outputs, time]."""
        output: torch.Tensor = self.conv(context.join(chunk, self._past) if self._past else chunk)
        return output


class Upsampling(nn.Module):
    """A transposed convolution: each entry becomes `stride` samples, which may also depend on the entry before it.

    Args:
        kernel: `stride`, or twice as long for samples that also depend on the entry before.
        trims_start: whether the very first entry only serves as the past of the second, and becomes no samples.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, *, trims_start: bool = False) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride=stride)
        self._overlap = kernel - stride
        self._trims_start = trims_start

    def forward(self, chunk: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, outputs, stride * time], and `stride` samples less for a first chunk if the start is trimmed."""
        if not self._overlap:
            output: torch.Tensor = self.conv(chunk)
            return output
        output = self.conv(context.join(chunk, 1, zeros=not self._trims_start))
        return output[..., self._overlap : output.shape[-1] - self._overlap]


class SnakeBeta(nn.Module):
    """x + sin(x * exp(alpha))^2 / exp(beta), with an alpha and a beta per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, chunk: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        frequency = self.alpha.exp()[:, None]
        scale = (self.beta.exp() + 1e-9).reciprocal()[:, None]
        return torch.addcmul(chunk, scale, (chunk * frequency).sin_().square_())


class ConvNextBlock(nn.Module):
    """A depthwise convolution and two linear layers, around which the input is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, chunk: torch.Tensor, context: Context) -> torch.Tensor:
        """The same shape."""
        hidden = self.norm(self.dwconv(chunk, context).transpose(1, 2))
        hidden = self.gamma * self.pwconv2(self.act(self.pwconv1(hidden)))
        output: torch.Tensor = chunk + hidden.transpose(1, 2)
        return output


class ResidualUnit(nn.Module):
    """Two convolutions with their activations, around which the input is added."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = SnakeBeta(channels)
        self.conv1 = CausalConv(channels, channels, 7, dilation=dilation)
        self.act2 = SnakeBeta(channels)
        self.conv2 = CausalConv(channels, channels, 1)

    def forward(self, chunk: torch.Tensor, context: Context) -> torch.Tensor:
        """The same shape."""
        hidden: torch.Tensor = self.conv1(self.act1(chunk), context)
        hidden = self.conv2(self.act2(hidden), context)
        return chunk + hidden


class DecoderBlock(nn.Module):
    """Upsampling by `rate` to half the channels, and residual units of growing reach."""

    def __init__(self, channels: int, rate: int, *, trims_start: bool) -> None:
        super().__init__()
        upsampling = Upsampling(channels, channels // 2, 2 * rate, rate, trims_start=trims_start)
        units = [ResidualUnit(channels // 2, dilation) for dilation in DILATIONS]
        self.block = nn.ModuleList([SnakeBeta(channels), upsampling, *units])

    def forward(self, chunk: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, channels / 2, rate * time]; see `Upsampling` for a first chunk."""
        activation, *layers = self.block
        chunk = activation(chunk)
        for layer in layers:
            chunk = layer(chunk, context)
        return chunk
