"""Qwen-Image's VAE, whose decoder has diffusers' layers in the order of a GPU's convolutions.

diffusers keeps a dimension of time, which has one place, and the channels before the pixels. Convolutions of half
precision want them after the pixels, and so do norms over channels, which are then rows. The parameters are those of
diffusers' modules, which this takes over.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from omni_actors.engine.models.diffusers_layout import PartConfig
from omni_actors.engine.models.diffusion_layers import norm_pixels
from omni_actors.engine.models.pictures.vae_stage import PictureVae
from omni_actors.engine.models.qwen_image import LATENT_PIXELS, MULTIPLE
from omni_actors.errors import ConfigError

LEAST_LENGTH = 1e-12  # of a pixel's channels, by which they are divided


class PictureDecoder:
    """Latents to a picture; `vae` is diffusers' `AutoencoderKLQwenImage21`, whose weights change their layout.

    Args:
        fused: norm pixels in a kernel of Triton.
    """

    def __init__(self, vae: Any, *, fused: bool) -> None:
        self._vae = vae.to(memory_format=torch.channels_last)
        self._fused = fused
        shortcuts = [(block, block.avg_shortcut) for block in vae.decoder.up_blocks if block.avg_shortcut is not None]
        self._sources = {block: sources_of(shortcut).to(vae.device) for block, shortcut in shortcuts}

    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        """The picture [channels, height, width] from -1 to 1, of latents of the same order as the VAE has them."""
        decoder = self._vae.decoder
        pixels = latents[None].contiguous(memory_format=torch.channels_last)
        pixels = _convolved(decoder.conv_in, _convolved(self._vae.post_quant_conv, pixels))
        pixels = self._residual(decoder.mid_block.resnets[0], pixels)
        for attention, block in zip(decoder.mid_block.attentions, decoder.mid_block.resnets[1:], strict=True):
            pixels = self._residual(block, _attended(attention, pixels))
        for block in decoder.up_blocks:
            pixels = self._raised(block, pixels)
        pixels = _convolved(decoder.conv_out, self._normed(decoder.norm_out, pixels))
        return pixels[0].clamp(-1.0, 1.0)

    def _residual(self, block: Any, pixels: torch.Tensor) -> torch.Tensor:
        changed = _convolved(block.conv1, self._normed(block.norm1, pixels))
        changed = _convolved(block.conv2, self._normed(block.norm2, changed))
        if not isinstance(block.conv_shortcut, nn.Identity):
            pixels = _convolved(block.conv_shortcut, pixels)
        return changed.add_(pixels)

    def _raised(self, block: Any, given: torch.Tensor) -> torch.Tensor:
        """After a block, with twice as many pixels along an edge if it has a way to raise them."""
        pixels = given
        for residual in block.resnets:
            pixels = self._residual(residual, pixels)
        if block.upsampler is not None:
            pixels = _convolved(block.upsampler.resample[1], _doubled(pixels))
        if block.avg_shortcut is not None:
            _, _, height, width = given.shape
            # Each channel of each of the four pixels that one becomes is a channel of that one.
            parts = given.permute(0, 2, 3, 1)[..., self._sources[block]]  # [1, height, width, 2, 2, channels]
            pixels.permute(0, 2, 3, 1).view(1, height, 2, width, 2, -1).add_(parts.transpose(2, 3))
        return pixels

    def _normed(self, norm: Any, pixels: torch.Tensor) -> torch.Tensor:
        """silu of normed pixels."""
        if self._fused:
            return norm_pixels(pixels, norm.gamma, norm.scale)
        return F.silu(_unit(norm, pixels))


def _convolved(layer: Any, pixels: torch.Tensor) -> torch.Tensor:
    weight, bias = cast("tuple[torch.Tensor, torch.Tensor]", (layer.weight, layer.bias))
    return F.conv2d(pixels, weight, bias, padding=layer.kernel_size[0] // 2)


def _unit(norm: Any, pixels: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = F.normalize(pixels.float(), dim=1, eps=LEAST_LENGTH).to(pixels.dtype)
    normed = normed * norm.scale * norm.gamma.view(1, -1, 1, 1)
    return normed


def _attended(block: Any, pixels: torch.Tensor) -> torch.Tensor:
    """With what each pixel found in all of them."""
    _, channels, height, width = pixels.shape
    rows = _convolved(block.to_qkv, _unit(block.norm, pixels)).permute(0, 2, 3, 1).reshape(1, 1, -1, 3 * channels)
    query, key, value = rows.chunk(3, -1)
    found = F.scaled_dot_product_attention(query, key, value)
    return pixels + _convolved(block.proj, found.view(1, height, width, channels).permute(0, 3, 1, 2))


def _doubled(pixels: torch.Tensor) -> torch.Tensor:
    """Each pixel as four."""
    _, channels, height, width = pixels.shape
    rows = pixels.permute(0, 2, 3, 1)[:, :, None, :, None].expand(-1, -1, 2, -1, 2, -1)
    return rows.reshape(1, 2 * height, 2 * width, channels).permute(0, 3, 1, 2)


def sources_of(shortcut: Any) -> torch.Tensor:
    """The channels i64 [2, 2, channels] that a shortcut takes for each channel of the four pixels that one becomes.

    Of the moments that it would make of a video's first one, it keeps the last.
    """
    edge, moments = shortcut.factor_s, shortcut.factor_t
    channels = torch.arange(shortcut.out_channels * shortcut.factor) // shortcut.repeats
    sources: torch.Tensor = channels.view(-1, moments, edge, edge)[:, -1].permute(1, 2, 0).contiguous()
    return sources


class QwenImageVae(PictureVae):
    """The VAE, whose pictures have an alpha channel."""

    class_name = "AutoencoderKLQwenImage21"
    latent_pixels = LATENT_PIXELS
    multiple = MULTIPLE
    picture_channels = 4

    def configure(self, config: PartConfig) -> None:
        """Take the sizes, and how latents are scaled."""
        self._scaling = [config.get(name) or () for name in ("latents_mean", "latents_std")]
        self.channels = len(self._scaling[0])
        if not self.channels or not self.channels == len(self._scaling[1]) == config.get("z_dim"):
            raise ConfigError("The checkpoint's VAE needs z_dim values in latents_mean and in latents_std.")
        config.expect(scale_factor_spatial=LATENT_PIXELS, patch_size=None, is_residual=True)
        self.width = max(config.get("decoder_base_dim") or 1, config.get("base_dim") or 1)

    def encode(self, levels: torch.Tensor) -> torch.Tensor:
        """The mean of a picture's latents, those of each channel with a mean of 0 and a spread of 1."""
        mean, spread = self._scaled(levels)
        found: torch.Tensor = self.model.encode(levels[None, :, None]).latent_dist.mode()
        return (found[0, :, 0] - mean) / spread

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The picture [4, height, width] from -1 to 1."""
        mean, spread = self._scaled(latents)
        return self._decoder(latents * spread + mean)

    def _scaled(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Mean and spread of each channel of the VAE's latents."""
        return [like.new_tensor(values).view(-1, 1, 1) for values in self._scaling]

    @cached_property
    def _decoder(self) -> PictureDecoder:
        return PictureDecoder(self.model, fused=self.model.device.type == "cuda")
