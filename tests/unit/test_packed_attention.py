"""Which attention packed steps of pictures compute with, and how many tokens a step takes."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from omni_actors.engine.models.pictures.denoising import (
    attend_each,
    attend_varlen,
    fastest_attention,
    pack,
    vllm_attention,
)

KERNELS = "vllm.vllm_flash_attn"


def kernels(*versions: int) -> Any:
    """What vLLM's module offers on a GPU with these versions, computed on the CPU."""
    module: Any = types.ModuleType(KERNELS)
    module.used = []

    def varlen(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_seqlen_q: int, cu_seqlens_q: torch.Tensor,
        max_seqlen_k: int, cu_seqlens_k: torch.Tensor, *, fa_version: int,
    ) -> torch.Tensor:  # fmt: skip
        module.used.append((fa_version, max_seqlen_q, max_seqlen_k))
        lengths = cu_seqlens_k.diff().tolist()
        assert cu_seqlens_q.diff().tolist() == lengths
        parts = (
            [each.transpose(0, 1) for each in triple]
            for triple in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        )
        return torch.cat([F.scaled_dot_product_attention(*part).transpose(0, 1) for part in parts])

    module.flash_attn_varlen_func = varlen
    module.is_fa_version_supported = lambda version: version in versions
    return module


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch):
    """Installs a module in the place of vLLM's kernels; None for an installation without them."""
    return lambda module: monkeypatch.setitem(sys.modules, KERNELS, module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_in_half_precision_vllms_attention_is_used_where_it_is_installed(offer, dtype):
    offer(kernels(2, 3))
    assert fastest_attention("cuda", dtype).__name__ == "attend_vllm"
    for without in (kernels(), None):
        offer(without)
        assert fastest_attention("cuda", dtype) is attend_varlen


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.float32)]
)
def test_elsewhere_pytorchs_attention_is_used_for_each_run_of_equal_sequences(offer, device, dtype):
    offer(kernels(2, 3))
    assert fastest_attention(device, dtype) is attend_each


@pytest.mark.parametrize(("versions", "best"), [((2, 3), 3), ((2,), 2)])
def test_vllms_attention_gets_the_sequences_of_the_batch_and_the_best_version_of_the_gpu(offer, versions, best):
    module = kernels(*versions)
    offer(module)
    attend = vllm_attention()
    packing = pack([3, 3, 5, 1], torch.device("cpu"))
    query, key, value = torch.randn(3, 12, 2, 8).unbind()
    assert attend is not None
    torch.testing.assert_close(attend(query, key, value, packing), attend_each(query, key, value, packing))
    assert module.used == [(best, 5, 5)]
