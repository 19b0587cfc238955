"""Ear and eye of the thinker in plain torch, with the published names, for batches of one shape."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.speaker.training.decoder import Norm, TextThinker, turn

CHUNK = 200  # frames of sound that attend to each other
PATCH = 14  # pixels; a token is two by two patches


class EarAttention(nn.Module):
    """Attention among the frames of a chunk."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj, self.q_proj, self.out_proj = (nn.Linear(size, size) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the same shape [B, N, size]."""
        b, n, c = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.out_proj(y.transpose(1, 2).reshape(b, n, c))
        return out


class EarLayer(nn.Module):
    """Attention and two linear layers, each added to what it reads."""

    def __init__(self, size: int, heads: int, inner: int) -> None:
        super().__init__()
        self.self_attn = EarAttention(size, heads)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.fc1, self.fc2 = nn.Linear(size, inner), nn.Linear(inner, size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the same shape."""
        x = x + self.self_attn(self.self_attn_layer_norm(x), mask)
        out: Tensor = x + self.fc2(functional.gelu(self.fc1(self.final_layer_norm(x))))
        return out


class Ear(nn.Module):
    """[B, 128, C * 200] log mels with their lengths -> [B, C * 50, 192]; only the first rows of each mean something."""

    places: Tensor

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        size = sizes.d_model
        self.conv1 = nn.Conv1d(sizes.num_mel_bins, size, 3, padding=1)
        self.conv2 = nn.Conv1d(size, size, 3, stride=2, padding=1)
        self.audio_bos_eos_token = nn.Embedding(2, sizes.output_dim)
        self.layers = nn.ModuleList(
            EarLayer(size, sizes.encoder_attention_heads, sizes.encoder_ffn_dim) for _ in range(sizes.encoder_layers)
        )
        self.ln_post, self.proj = nn.LayerNorm(size), nn.Linear(size, sizes.output_dim)
        step = math.log(10000) / (size // 2 - 1)
        angle = torch.arange(CHUNK // 2)[:, None] * torch.exp(-step * torch.arange(size // 2).float())[None]
        self.register_buffer("places", torch.cat([angle.sin(), angle.cos()], 1), persistent=False)

    def forward(self, mel: Tensor, lengths: Tensor) -> Tensor:
        """Return one row for four frames."""
        b, bins, frames = mel.shape
        chunks = frames // CHUNK
        x = mel.view(b, bins, chunks, CHUNK).transpose(1, 2).reshape(b * chunks, bins, CHUNK)
        left = (lengths[:, None] - CHUNK * torch.arange(chunks, device=mel.device)).clamp(0, CHUNK).reshape(-1)
        heard = torch.arange(CHUNK, device=mel.device)[None] < left[:, None]
        x = x.to(self.conv1.weight.dtype) * heard[:, None]
        x = functional.gelu(self.conv1(x)) * heard[:, None]
        x = functional.gelu(self.conv2(x)).transpose(1, 2) + self.places.to(x.dtype)
        tokens = (left + 1) // 2
        mask = torch.arange(CHUNK // 2, device=mel.device)[None] < tokens[:, None].clamp(min=1)
        for layer in self.layers:
            x = layer(x, mask[:, None, None])
        x = x.reshape(b, chunks * (CHUNK // 4), 2, -1).mean(2)
        out: Tensor = self.proj(self.ln_post(x))
        return out


class EyeAttention(nn.Module):
    """Attention among patches."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.proj = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Return the same shape [B, N, size]."""
        b, n, c = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, attn_mask=mask)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(b, n, c))
        return out


class EyeMLP(nn.Module):
    """Gated layers with biases."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(size, inner), nn.Linear(size, inner)
        self.down_proj = nn.Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class EyeBlock(nn.Module):
    """Attention and gated layers, each added to what it reads."""

    def __init__(self, size: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(size), Norm(size)
        self.attn, self.mlp = EyeAttention(size, heads), EyeMLP(size, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Return the same shape."""
        x = x + self.attn(self.norm1(x), cos, sin, mask)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Patches(nn.Module):
    """Holds the weights that turn patches into vectors; `Eye` applies them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, size, (2, PATCH, PATCH), (2, PATCH, PATCH), bias=False)


class Merger(nn.Module):
    """Holds the weights that make one token of four patches; `Eye` applies them."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.ln_q = Norm(size)
        self.mlp = nn.Sequential(nn.Linear(4 * size, 4 * size), nn.GELU(), nn.Linear(4 * size, out))


class Eye(nn.Module):
    """Pictures [B, 3, 28 h, 28 w], normalised -> [B, h * w, 192]."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        size = sizes.hidden_size
        self.patch_embed, self.merger = Patches(size), Merger(size, sizes.out_hidden_size)
        self.blocks = nn.ModuleList(
            EyeBlock(size, sizes.num_heads, sizes.intermediate_size) for _ in range(sizes.depth)
        )
        self.full, self.window = set(sizes.fullatt_block_indexes), sizes.window_size // (2 * PATCH)
        self.dim = size // sizes.num_heads
        self.known: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def layout(self, h: int, w: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Returns cos and sin [4 h w, dim] of the patches, and which of them lie in the same window."""
        if (h, w) not in self.known:
            row = torch.arange(2 * h, device=device).view(h, 1, 2, 1).expand(h, w, 2, 2).reshape(-1)
            col = torch.arange(2 * w, device=device).view(1, w, 1, 2).expand(h, w, 2, 2).reshape(-1)
            half = self.dim // 2
            inverse = 1.0 / 10000.0 ** (torch.arange(0, half, 2, device=device).float() / half)
            angle = torch.cat([row[:, None] * inverse, col[:, None] * inverse], -1)
            angle = torch.cat([angle, angle], -1)
            window = (row // 2 // self.window) * 1000 + col // 2 // self.window
            self.known[h, w] = angle.cos(), angle.sin(), window[:, None] == window[None]
        return self.known[h, w]

    def forward(self, pictures: Tensor) -> Tensor:
        """Return one row for each square of 28 pixels."""
        b, _, height, width = pictures.shape
        h, w = height // (2 * PATCH), width // (2 * PATCH)
        cos, sin, window = self.layout(h, w, pictures.device)
        patches = pictures.view(b, 3, h, 2, PATCH, w, 2, PATCH).permute(0, 2, 5, 3, 6, 1, 4, 7)
        patches = patches.reshape(b, 4 * h * w, 3 * PATCH * PATCH)
        weight = self.patch_embed.proj.weight.sum(2).reshape(-1, 3 * PATCH * PATCH)  # a picture is two equal frames
        x = functional.linear(patches.to(weight.dtype), weight)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for number, block in enumerate(self.blocks):
            x = block(x, cos, sin, None if number in self.full else window)
        out: Tensor = self.merger.mlp(self.merger.ln_q(x).view(b, h * w, -1))
        return out


class Thinker(TextThinker):
    """The whole thinker: text, ear and eye."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__(sizes["text"])
        self.audio_tower, self.visual = Ear(sizes["audio"]), Eye(sizes["vision"])
