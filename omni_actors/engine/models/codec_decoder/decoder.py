"""The network: frames of codes in, samples out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from omni_actors.engine.models.codec_decoder.context import Context
from omni_actors.engine.models.codec_decoder.layers import (
    CausalConv,
    ConvNextBlock,
    DecoderBlock,
    SnakeBeta,
    Upsampling,
)
from omni_actors.engine.models.codec_decoder.transformer import FrameTransformer, TransformerSizes


@dataclass(frozen=True)
class CodecSizes:
    """Sizes of a codec decoder, in the checkpoints' words.

    Args:
        num_quantizers: codes of a frame.
        codebook_size: values that a code can have.
        upsampling_ratios: of frames, before the convolutions.
        upsample_rates: of the convolutions; each halves the channels, from `decoder_dim`.
        max_position_embeddings: frames of the longest utterance.
        trims_start: whether each convolution that upsamples leaves out the first entry; the sound is then shorter.
        sample_rate: samples per second.
    """

    num_quantizers: int
    codebook_size: int
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]
    decoder_dim: int
    max_position_embeddings: int
    transformer: TransformerSizes
    trims_start: bool
    sample_rate: int = 24_000

    @classmethod
    def of(cls, config: Any, *, rope_theta: float, latent_dim: int = 0, **own: Any) -> CodecSizes:
        """From a checkpoint's configuration of the decoder, and what such configurations leave open."""
        transformer = TransformerSizes(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            attention_bias=config.attention_bias,
            rms_norm_eps=config.rms_norm_eps,
            sliding_window=config.sliding_window,
            rope_theta=rope_theta,
            latent_dim=latent_dim,
        )
        return cls(
            num_quantizers=config.num_quantizers,
            codebook_size=config.codebook_size,
            upsampling_ratios=tuple(config.upsampling_ratios),
            upsample_rates=tuple(config.upsample_rates),
            decoder_dim=config.decoder_dim,
            max_position_embeddings=config.max_position_embeddings,
            transformer=transformer,
            **own,
        )

    @property
    def samples_per_frame(self) -> int:
        """Samples that a frame adds to the sound."""
        return math.prod(self.upsampling_ratios) * math.prod(self.upsample_rates)

    @property
    def width(self) -> int:
        """Width of a frame between the transformer and the convolutions."""
        return self.transformer.latent_dim or self.transformer.hidden_size

    def samples(self, frames: int) -> int:
        """Length of the sound of `frames` frames."""
        length = frames * math.prod(self.upsampling_ratios)
        for rate in self.upsample_rates:
            length = max(0, length - self.trims_start) * rate
        return length

    @property
    def widest(self) -> int:
        """Elements per frame of the largest tensor between two layers."""
        largest, rate, channels = 0, math.prod(self.upsampling_ratios), self.decoder_dim
        for factor in self.upsample_rates:
            rate, channels = rate * factor, channels // 2
            largest = max(largest, rate * channels)
        return largest


class CodecDecoder(nn.Module):
    """Codes to sound, chunk after chunk.

    Args:
        front: turns codes [batch, quantizers, frames] and a `Context` into [batch, frames, width].
        front_name: its name in the checkpoint.
    """

    def __init__(self, sizes: CodecSizes, front: nn.Module, front_name: str) -> None:
        super().__init__()
        self.sizes = sizes
        self._front = front_name
        self.add_module(front_name, front)
        self.pre_transformer = FrameTransformer(sizes.transformer)
        width = sizes.width
        self.upsample = nn.ModuleList(
            nn.ModuleList([Upsampling(width, width, factor, factor), ConvNextBlock(width)])
            for factor in sizes.upsampling_ratios
        )
        channels = sizes.decoder_dim
        layers: list[nn.Module] = [CausalConv(sizes.width, channels, 7)]
        for rate in sizes.upsample_rates:
            layers.append(DecoderBlock(channels, rate, trims_start=sizes.trims_start))
            channels //= 2
        self.decoder = nn.ModuleList([*layers, SnakeBeta(channels), CausalConv(channels, 1, 7)])

    def forward(
        self, codes: torch.Tensor, position: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the next frames of a batch of utterances.

        Args:
            codes: i64 [batch, quantizers, frames].
            position: i64 [batch], frames before these.
            state: [batch, size], what the frames before left; None if these are the first.

        Returns:
            f32 samples [batch, time], and the state after these frames.
        """
        context = Context(position, state)
        hidden = self.get_submodule(self._front)(codes, context)
        hidden = self.pre_transformer(hidden, context).transpose(1, 2)
        for stage in self.upsample:
            for layer in cast(nn.ModuleList, stage):
                hidden = layer(hidden, context)
        for layer in self.decoder:
            hidden = layer(hidden) if isinstance(layer, SnakeBeta) else layer(hidden, context)
        return hidden.squeeze(1).float().clamp(-1, 1), context.state()
