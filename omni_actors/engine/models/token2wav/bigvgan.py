"""BigVGAN: mel frames to waveform, batched, with the context that a chunk needs to equal the whole decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from omni_actors.engine.models.token2wav.kernels import anti_aliased_snake

if TYPE_CHECKING:
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig

ACTIVATION_REACH = 5  # samples on either side that an anti-aliased activation looks at


def receptive_frames(config: Qwen2_5OmniBigVGANConfig) -> int:
    """Mel frames on either side of a sample's own frame that can change the sample. An upper bound, tight to a frame.

    Found by walking from the waveform back to the mel frames with the half-width that a sample depends on.
    """
    residual = max(
        sum(2 * ACTIVATION_REACH + (kernel - 1) // 2 * (dilation + 1) for dilation in dilations)
        for kernel, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
    )
    reach = 3 + ACTIVATION_REACH  # the last convolution has 7 taps
    for stride, kernel in reversed(list(zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True))):
        padding = (kernel - stride) // 2
        reach = (reach + residual + max(padding, kernel - 1 - padding)) // stride + 1
    return reach + 3  # and so has the first


class Vocoder:
    """transformers' BigVGAN without its copy to the host, and with its activations fused on CUDA.

    Args:
        model: the loaded `Qwen2_5OmniToken2WavBigVGANModel`.
        fused: use the Triton kernel for the activations.
    """

    def __init__(self, model: nn.Module, *, fused: bool) -> None:
        self.model = model
        self.context = receptive_frames(model.config)
        self.samples_per_frame = 1
        for rate in model.config.upsample_rates:
            self.samples_per_frame *= rate
        self._activations: dict[nn.Module, tuple[torch.Tensor, ...]] = {}
        if fused:
            modules = [model.activation_post, *(a for block in model.resblocks for a in block.activations)]
            for module in modules:
                self._activations[module] = (
                    module.upsample.filter.flatten().float().contiguous(),
                    module.downsample.filter.flatten().float().contiguous(),
                    module.act.alpha.exp().float(),
                    1.0 / (module.act.beta.exp().float() + module.act.no_div_by_zero),
                )

    def __call__(self, mel: torch.Tensor) -> torch.Tensor:
        """`mel` f32 [requests, mel_dim, frames] to f32 [requests, samples], on the same device."""
        model = self.model
        kernels = model.num_residual_blocks
        hidden = model.conv_pre(model.process_mel_spectrogram(mel))
        for index, (upsample,) in enumerate(model.ups):
            hidden = upsample(hidden)
            blocks = model.resblocks[index * kernels : (index + 1) * kernels]
            hidden = self._mean([self._residual(block, hidden) for block in blocks])
        hidden = model.conv_post(self._activate(model.activation_post, hidden))
        return hidden.clamp(-1.0, 1.0)[:, 0]

    def _residual(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        activations = block.activations
        for index, (first, second) in enumerate(zip(block.convs1, block.convs2, strict=True)):
            inner = first(self._activate(activations[2 * index], hidden))
            hidden = hidden + second(self._activate(activations[2 * index + 1], inner))
        return hidden

    def _activate(self, module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        parameters = self._activations.get(module)
        return module(hidden) if parameters is None else anti_aliased_snake(hidden, *parameters)

    @staticmethod
    def _mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum(tensors) / len(tensors)


