"""How sequences of different lengths lie in one packed batch, and the attention that keeps them apart. Torch only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Packing:
    """Sequences that lie one after the other in tensors [tokens, ...].

    Args:
        lengths: tokens of each sequence.
        offsets: i32 [sequences + 1] on the device; where each begins, and where the last ends.
        owner: i64 [tokens] on the device; the sequence that each token belongs to.
    """

    lengths: tuple[int, ...]
    offsets: torch.Tensor
    owner: torch.Tensor

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)


Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Packing], torch.Tensor]
"""Queries, keys and values [tokens, heads, head_dim] -> [tokens, heads, head_dim], each sequence on its own."""


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device, from the CPU through pinned memory: any other copy waits for all work queued there."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pack(lengths: Sequence[int], device: torch.device) -> Packing:
    """The packing of sequences with these lengths."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, out=offsets[1:])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    return Packing(tuple(lengths), moved(offsets, device), moved(owner, device))


def attend_each(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing) -> torch.Tensor:
    """`Attention` on every device: one call of PyTorch's for each run of sequences of the same length."""
    heads, head_dim = query.shape[1:]
    results = []
    begin = 0
    for length, count in _runs(packing.lengths):
        end = begin + length * count
        shape = (count, length, heads, head_dim)
        own_query, own_key, own_value = (each[begin:end].view(shape).transpose(1, 2) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(own_query, own_key, own_value)
        results.append(attended.transpose(1, 2).reshape(-1, heads, head_dim))
        begin = end
    return results[0] if len(results) == 1 else torch.cat(results)


def _runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Lengths with the number of times that each stands in a row."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][0] == length:
            runs[-1] = length, runs[-1][1] + 1
        else:
            runs.append((length, 1))
    return runs


def attend_varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing) -> torch.Tensor:
    """`Attention` for CUDA in half precision: one call of PyTorch's flash attention for the whole batch."""
    from torch.nn.attention.varlen import varlen_attn

    offsets, longest = packing.offsets, packing.longest
    output = varlen_attn(query, key, value, offsets, offsets, longest, longest)
    return output if isinstance(output, torch.Tensor) else output[0]
