"""How sequences of different lengths lie in one packed batch, and the attention that keeps them apart.

Needs torch only; vLLM's attention is used where it is installed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)


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


class Attention(Protocol):
    """Attention of packed sequences."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, keys: Packing | None = None
    ) -> torch.Tensor:
        """What each query finds in its own sequence: [tokens, heads, head_dim].

        Args:
            query: [tokens, heads, head_dim].
            key: [tokens of the keys, heads, head_dim]; so is `value`.
            packing: of the queries.
            keys: that of the keys; None if it is the same. A sequence may have more keys than queries.
        """


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


def attend_each(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, keys: Packing | None = None
) -> torch.Tensor:
    """`Attention` on every device: one call of PyTorch's for each run of sequences of the same lengths."""
    heads, head_dim = query.shape[1:]
    results = []
    begin = key_begin = 0
    for (length, key_length), count in _runs(packing.lengths, (keys or packing).lengths):
        end, key_end = begin + length * count, key_begin + key_length * count
        own_query = query[begin:end].view(count, length, heads, head_dim).transpose(1, 2)
        own_key, own_value = (
            each[key_begin:key_end].view(count, key_length, heads, head_dim).transpose(1, 2) for each in (key, value)
        )
        attended = F.scaled_dot_product_attention(own_query, own_key, own_value)
        results.append(attended.transpose(1, 2).reshape(-1, heads, head_dim))
        begin, key_begin = end, key_end
    return results[0] if len(results) == 1 else torch.cat(results)


def _runs(lengths: Sequence[int], key_lengths: Sequence[int]) -> list[tuple[tuple[int, int], int]]:
    """Pairs of lengths with the number of times that each stands in a row."""
    pairs = zip(lengths, key_lengths, strict=True)
    return [(pair, len(list(group))) for pair, group in itertools.groupby(pairs)]


def attend_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, keys: Packing | None = None
) -> torch.Tensor:
    """`Attention` for CUDA in half precision: one call of PyTorch's flash attention for the whole batch."""
    from torch.nn.attention.varlen import varlen_attn

    keys = keys or packing
    output = varlen_attn(query, key, value, packing.offsets, keys.offsets, packing.longest, keys.longest)
    return output if isinstance(output, torch.Tensor) else output[0]


def vllm_attention() -> Attention | None:
    """`Attention` for CUDA in half precision by vLLM's kernels; None where they are not installed, or not for this GPU.

    With FlashAttention 3, on Hopper, a step of 2048 x 2048 pixels is 1.3 times as fast as with PyTorch's.
    """
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:  # no vLLM, or one that was built without these kernels, as for CPUs
        return None
    version = next((version for version in (3, 2) if is_fa_version_supported(version)), None)
    if version is None:
        return None

    def attend_vllm(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, keys: Packing | None = None
    ) -> torch.Tensor:
        keys = keys or packing
        output: torch.Tensor = flash_attn_varlen_func(
            query, key, value, cu_seqlens_q=packing.offsets, cu_seqlens_k=keys.offsets, max_seqlen_q=packing.longest,
            max_seqlen_k=keys.longest, fa_version=version,
        )  # fmt: skip
        return output

    return attend_vllm


def fastest_attention(device_type: str, dtype: torch.dtype) -> Attention:
    """The attention for a device and a type of numbers: on CUDA in half precision vLLM's, else PyTorch's packed one."""
    if device_type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return attend_each
    chosen = vllm_attention() or attend_varlen
    logger.info("attention of the packed batch: %s", getattr(chosen, "__name__", chosen))
    return chosen
