"""Decoders of thinker and talker in plain torch, with the published names: quick to train and to sample from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MROPE_SECTIONS = (4, 6, 6)  # of time, height, width
THETA = 1e6


class Norm(nn.Module):
    """Root mean square normalisation."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        return functional.rms_norm(x, self.weight.shape, self.weight, 1e-6)


def rope(places: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [..., dim] for places of any shape."""
    steps = torch.arange(0, dim, 2, device=places.device, dtype=torch.float32)
    angle = places[..., None].float() * (1.0 / THETA ** (steps / dim))
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def mrope(places: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [B, 1, L, dim] for places [3, B, L] of time, height, width."""
    both = []
    for value in rope(places, dim):
        parts = value.split(list(MROPE_SECTIONS) * 2, -1)
        both.append(torch.cat([part[index % 3] for index, part in enumerate(parts)], -1)[:, None])
    return both[0], both[1]


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns queries or keys turned to their places."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Cache:
    """Keys and values of all layers for a batch whose rows begin at different places: right-aligned by a mask."""

    def __init__(self, batch: int, length: int, device: torch.device | str) -> None:
        self.batch, self.length, self.device = batch, length, device
        self.store: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.start, self.mask = 0, torch.empty(0)

    def at(self, start: int, mask: Tensor) -> Cache:
        """Writes go to `start` and on; mask [B, 1, L, length] says which places are seen."""
        self.start, self.mask = start, mask
        return self

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns what queries see of all keys so far, of which k and v are the newest."""
        if layer not in self.store:
            shape = (self.batch, k.shape[1], self.length, k.shape[3])
            self.store[layer] = k.new_zeros(shape), v.new_zeros(shape)
        keys, values = self.store[layer]
        end = self.start + k.shape[2]
        keys[:, :, self.start : end], values[:, :, self.start : end] = k, v
        return functional.scaled_dot_product_attention(
            q, keys[:, :, :end], values[:, :, :end], attn_mask=self.mask[..., :end], enable_gqa=True
        )


class Attention(nn.Module):
    """Causal attention with grouped keys; `seen`, where it is a list, receives queries and keys."""

    def __init__(self, size: int, heads: int, groups: int, dim: int) -> None:
        super().__init__()
        self.heads, self.groups, self.dim = heads, groups, dim
        self.seen: list[tuple[Tensor, Tensor]] | None = None
        self.q_proj = nn.Linear(size, heads * dim)
        self.k_proj = nn.Linear(size, groups * dim)
        self.v_proj = nn.Linear(size, groups * dim)
        self.o_proj = nn.Linear(heads * dim, size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        """Return [B, L, size]."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.groups, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.groups, self.dim).transpose(1, 2)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        if cache is None:
            repeat = self.heads // self.groups
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            if self.seen is not None:
                self.seen.append((q, k))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = cache.attend(self, q, k, v)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """Gated layers."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and gated layers, each added to what it reads."""

    def __init__(self, size: int, inner: int, heads: int, groups: int, dim: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(size), Norm(size)
        self.self_attn, self.mlp = Attention(size, heads, groups, dim), MLP(size, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embeddings, layers and a last norm, as both have them under `model.`."""

    def __init__(self, sizes: Any, width: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.embed_tokens = nn.Embedding(sizes.vocab_size, width)
        self.layers = nn.ModuleList(
            Layer(sizes.hidden_size, sizes.intermediate_size, sizes.num_attention_heads, sizes.num_key_value_heads, dim)
            for _ in range(sizes.num_hidden_layers)
        )
        self.norm = Norm(sizes.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        """Return hidden states [B, L, size]."""
        for layer in self.layers:
            x = layer(x, cos, sin, cache)
        out: Tensor = self.norm(x)
        return out


class TextThinker(nn.Module):
    """The text part of the thinker."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.model = Decoder(sizes, sizes.hidden_size, sizes.hidden_size // sizes.num_attention_heads)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)

    def hidden(self, embeds: Tensor, places: Tensor | None = None) -> Tensor:
        """Returns [B, L, 192] for embeddings of that shape; places [3, B, L] only where a picture stands."""
        if places is None:
            cos, sin = rope(torch.arange(embeds.shape[1], device=embeds.device), self.model.dim)
        else:
            cos, sin = mrope(places, self.model.dim)
        out: Tensor = self.model(embeds, cos.to(embeds.dtype), sin.to(embeds.dtype))
        return out


class Talker(nn.Module):
    """Reads the sum of a text side and codec tokens; says the next codec token."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.model = Decoder(sizes, sizes.embedding_size, sizes.head_dim)
        self.thinker_to_talker_proj = nn.Linear(sizes.embedding_size, sizes.hidden_size)
        self.codec_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)

    def hidden(
        self, text: Tensor, code: Tensor, has_code: Tensor, cache: Cache | None = None, place: Tensor | None = None
    ) -> Tensor:
        """Returns [B, L, size] for text [B, L, 192], code and has_code [B, L]."""
        x = self.thinker_to_talker_proj(text + self.model.embed_tokens(code) * has_code[..., None])
        place = torch.arange(text.shape[1], device=text.device) if place is None else place
        cos, sin = rope(place, self.model.dim)
        out: Tensor = self.model(x, cos.to(x.dtype), sin.to(x.dtype), cache)
        return out
