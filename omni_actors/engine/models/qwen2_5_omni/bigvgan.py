"""BigVGAN: mel frames to waveform, in batches; and the context that a chunk needs to equal the whole decode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from omni_actors.engine.models.cuda_graphs import CudaGraphs
from omni_actors.engine.models.qwen2_5_omni.kernels import anti_aliased_snake

if TYPE_CHECKING:
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        Qwen2_5OmniAMPBlock,
        Qwen2_5OmniAntiAliasedActivation1d,
        Qwen2_5OmniToken2WavBigVGANModel,
    )

FLOOR_DB, REFERENCE_DB = -115, -20  # of the mel amplitudes, as in transformers' BigVGAN
ACTIVATION_REACH = 5  # samples on either side that an anti-aliased activation reads
GRAPH_BATCHES = (4, 2, 1)  # windows in a graph; more of them keep the device busy longer than their launches take
# Frames of windows that are run at the start, in every batch: together they use every variant of the kernels, so that
# no listener waits while one is compiled.
WARM_LENGTHS = (4, 12, 40, 120, 240)


def receptive_frames(config: Qwen2_5OmniBigVGANConfig) -> int:
    """Mel frames on either side of a sample's own frame that can change the sample: an upper bound, tight to a frame.

    Follows the half-width that a sample depends on from the waveform back to the mel frames.
    """
    residual = max(
        sum(2 * ACTIVATION_REACH + (kernel - 1) // 2 * (dilation + 1) for dilation in dilations)
        for kernel, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
    )
    reach = 3 + ACTIVATION_REACH  # the last convolution has 7 taps
    for stride, kernel in reversed(list(zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True))):
        padding = (kernel - stride) // 2
        reach = (reach + residual + max(padding, kernel - 1 - padding)) // stride + 1
    return reach + 3  # so has the first


class Vocoder:
    """transformers' BigVGAN without its copy to the host.

    Args:
        model: the loaded `Qwen2_5OmniToken2WavBigVGANModel`.
    """

    def __init__(self, model: Qwen2_5OmniToken2WavBigVGANModel) -> None:
        self.model = model
        self.samples_per_frame: int = math.prod(model.config.upsample_rates)
        self._least_amplitude = torch.tensor(FLOOR_DB / 20 * math.log(10)).exp().item()

    @torch.inference_mode()
    def __call__(self, mel: torch.Tensor) -> torch.Tensor:
        """Decode `mel` f32 [requests, mel_dim, frames] to f32 [requests, samples] on the same device."""
        model = self.model
        kernels = model.num_residual_blocks
        hidden: torch.Tensor = model.conv_pre(self._decibels(mel))
        for index, (upsample,) in enumerate(model.ups):
            hidden = upsample(hidden)
            blocks = model.resblocks[index * kernels : (index + 1) * kernels]
            hidden = sum(block(hidden) for block in blocks) / kernels
        hidden = model.conv_post(model.activation_post(hidden))
        return hidden.clamp(-1.0, 1.0)[:, 0]

    def _decibels(self, mel: torch.Tensor) -> torch.Tensor:
        """Convert logarithms of amplitudes to decibels, scaled to -1..1, f32.

        Equals transformers' `process_mel_spectrogram`, which creates a tensor on the device from a number, and so makes
        the host wait for all work queued before.
        """
        decibels = 20 * torch.log10(mel.exp().clamp(min=self._least_amplitude)) + REFERENCE_DB
        return (2 * ((decibels - FLOOR_DB) / -FLOOR_DB) - 1).clamp(-1, 1)


class _Convolution:
    """A one-dimensional convolution as a two-dimensional one over [batch, channels, 1, samples], channels last."""

    def __init__(self, module: nn.Conv1d | nn.ConvTranspose1d, dtype: torch.dtype, *, biased: bool = True) -> None:
        self.function: Callable[..., torch.Tensor] = (
            F.conv_transpose2d if isinstance(module, nn.ConvTranspose1d) else F.conv2d
        )
        self.weight = module.weight[:, :, None].to(dtype).contiguous(memory_format=torch.channels_last)
        self.bias = module.bias.to(dtype) if biased and module.bias is not None else None
        self.options = {
            name: (first, *getattr(module, name)) for name, first in (("stride", 1), ("padding", 0), ("dilation", 1))
        }

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.function(hidden, self.weight, self.bias, **self.options)


class _Activation:
    """The parameters of `anti_aliased_snake`; `offset` [channels] is what its input lacks."""

    def __init__(self, module: Qwen2_5OmniAntiAliasedActivation1d, offset: torch.Tensor) -> None:
        self.parameters: tuple[torch.Tensor, ...] = (
            offset.float(),
            module.upsample.filter.flatten().float().contiguous(),
            module.downsample.filter.flatten().float().contiguous(),
            module.act.alpha.exp().float(),
            1.0 / (module.act.beta.exp().float() + module.act.no_div_by_zero),
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return anti_aliased_snake(hidden, *self.parameters)


class _ResidualBlock:
    """Residual layers whose convolutions leave out their biases: a bias is a pass over memory, and there are a hundred.

    Activations add what their input lacks; `offset` [channels] is what the result lacks.
    """

    def __init__(self, block: Qwen2_5OmniAMPBlock, dtype: torch.dtype) -> None:
        self.offset = torch.zeros_like(block.convs1[0].bias)
        self._layers: list[tuple[_Activation, _Convolution, _Activation, _Convolution]] = []
        for act1, conv1, act2, conv2 in zip(
            block.activations[::2], block.convs1, block.activations[1::2], block.convs2, strict=True
        ):
            first, second = (_Convolution(conv, dtype, biased=False) for conv in (conv1, conv2))
            self._layers.append((_Activation(act1, self.offset), first, _Activation(act2, conv1.bias), second))
            self.offset = self.offset + conv2.bias

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        for act1, conv1, act2, conv2 in self._layers:
            hidden = hidden + conv2(act2(conv1(act1(hidden))))
        return hidden


class FusedVocoder(Vocoder):
    """BigVGAN for CUDA: fused activations, and channels last in memory, which tensor cores need for convolutions.

    Args:
        dtype: of weights and activations; float16 has the mantissa of TF32 at half the traffic.
    """

    def __init__(self, model: Qwen2_5OmniToken2WavBigVGANModel, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._dtype = dtype
        self._pre, self._post = _Convolution(model.conv_pre, dtype), _Convolution(model.conv_post, dtype)
        self._activate_post = _Activation(model.activation_post, torch.zeros_like(model.activation_post.act.alpha))
        self._ups = [_Convolution(upsample, dtype) for (upsample,) in model.ups]
        blocks = [_ResidualBlock(block, dtype) for block in model.resblocks]
        kernels: int = model.num_residual_blocks
        self._stages = [blocks[first : first + kernels] for first in range(0, len(blocks), kernels)]
        missing = [torch.stack([block.offset for block in stage]).mean(dim=0) for stage in self._stages]
        self._offsets = [offset[:, None, None].to(dtype) for offset in missing]

    @torch.inference_mode()
    def __call__(self, mel: torch.Tensor) -> torch.Tensor:
        """Decode `mel` f32 [requests, mel_dim, frames] to f32 [requests, samples] on the same device."""
        hidden = self._decibels(mel)[:, :, None].to(self._dtype)
        hidden = self._pre(hidden.contiguous(memory_format=torch.channels_last))
        for upsample, (first, *others), offset in zip(self._ups, self._stages, self._offsets, strict=True):
            source = upsample(hidden)
            hidden = first(source)
            for block in others:
                hidden = hidden + block(source)
            hidden = torch.add(offset, hidden, alpha=1 / (1 + len(others)))
        hidden = self._post(self._activate_post(hidden))
        return hidden.float().clamp(-1.0, 1.0)[:, 0, 0]


class GraphedVocoder:
    """A vocoder whose frequent windows are CUDA graphs: BigVGAN is some 300 kernels, most shorter than their launch.

    Args:
        vocoder: runs windows of other lengths, and is what is captured.
        lengths: of the windows, in frames.
    """

    @torch.inference_mode()
    def __init__(self, vocoder: Vocoder, lengths: Iterable[int], mel_dim: int, device: torch.device) -> None:
        self.samples_per_frame = vocoder.samples_per_frame
        self._vocoder = vocoder
        # By windows and their length: what is read, and the samples.
        self._graphs: CudaGraphs[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = CudaGraphs()
        for length in sorted(set(lengths), reverse=True):
            for batch in GRAPH_BATCHES:
                mel = torch.zeros(batch, mel_dim, length, device=device)
                self._graphs.capture((batch, length), partial(_decoded, vocoder, mel))
        for length in WARM_LENGTHS:
            for batch in GRAPH_BATCHES:
                vocoder(torch.zeros(batch, mel_dim, length, device=device))

    @torch.inference_mode()
    def __call__(self, mel: torch.Tensor) -> torch.Tensor:
        """Decode `mel` f32 [requests, mel_dim, frames] to f32 [requests, samples] on the same device."""
        parts = [self._run(part) for part in mel.split(graph_batches(mel.shape[0]))]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _run(self, mel: torch.Tensor) -> torch.Tensor:
        key = mel.shape[0], mel.shape[2]
        if key not in self._graphs.tensors:
            return self._vocoder(mel)
        self._graphs.tensors[key][0].copy_(mel)
        return self._graphs.replay(key)[1].clone()  # the next replay overwrites them


def _decoded(vocoder: Vocoder, mel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return mel, vocoder(mel)


def graph_batches(count: int) -> list[int]:
    """The batches of graphs, the largest first, that run `count` windows."""
    batches = []
    for batch in GRAPH_BATCHES:
        batches += [batch] * (count // batch)
        count %= batch
    return batches
