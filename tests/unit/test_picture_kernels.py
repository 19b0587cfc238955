"""Kernels of pictures' layers against PyTorch's functions, and which attention packed steps compute with."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import QwenImage21DupUp3D

from omni_actors.engine.models.diffusion_layers import add_and_norm, gate, rotation_at, take_heads
from omni_actors.engine.models.pictures.denoising import (
    attend_each,
    attend_varlen,
    fastest_attention,
    pack,
    vllm_attention,
)
from omni_actors.engine.models.qwen_image.dit import Prefix, QwenImageNetwork
from omni_actors.engine.models.qwen_image.vae import PictureDecoder, sources_of
from tools.checkpoints.pictures import QWEN_IMAGE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
OWNER = torch.tensor([0, 0, 1, 1, 1, 0, 2]).to(DEVICE)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.05}


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that are the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1])).to(DEVICE, dtype)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCES[theirs.dtype], rtol=TOLERANCES[theirs.dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("width", "added"), [(96, True), (96, False), (1100, False)])
def test_a_branch_is_gated_and_added_before_the_norm(width: int, added: bool, dtype: torch.dtype) -> None:
    given, branch = drawn(2, 7, width, dtype=dtype) + 3
    gates, scales = drawn(2, 3, width, dtype=dtype)
    ours, theirs = (
        add_and_norm(given.clone(), branch if added else None, gates, scales, OWNER, eps=EPS, fused=fused)
        for fused in (True, False)
    )
    for mine, reference in zip(ours, theirs, strict=True):
        assert_close(mine, reference)


@pytest.mark.parametrize("added", [False, True])
def test_rows_of_one_sequence_are_scaled_and_shifted_in_another_type(added: bool) -> None:
    given, branch = drawn(2, 3, 24, 48)
    gates, scales, shifts = drawn(2, 3 * 48).split(48, dim=1)
    owner = torch.tensor([[0], [1], [1]]).to(DEVICE)
    ours, theirs = (
        add_and_norm(
            given.clone(), branch if added else None, gates, scales, owner, shifts,
            eps=EPS, fused=fused, dtype=torch.bfloat16,
        )
        for fused in (True, False)
    )  # fmt: skip
    assert torch.equal(ours[0], given) is not added
    for mine, reference in zip(ours, theirs, strict=True):
        assert_close(mine, reference)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_queries_and_keys_are_turned_and_keys_and_values_go_to_their_places(dtype: torch.dtype) -> None:
    heads, size = 3, 16
    qkv = drawn(7, 3 * heads * size, dtype=dtype)
    norms = [torch.nn.RMSNorm(size, EPS).to(DEVICE, dtype).requires_grad_(False) for _ in range(2)]
    for norm in norms:
        norm.weight.copy_(drawn(size, dtype=dtype) + 2)
        norm.eps *= 1000  # large enough to matter
    positions = torch.arange(21).view(7, 3)
    rotation = rotation_at(positions, (4, 6, 6), 10_000.0).to(DEVICE)
    slots = torch.tensor([2, 3, 8, 9, 10, 4, 6]).to(DEVICE)
    kept = [torch.full((12, heads, size), 7.0, dtype=dtype, device=DEVICE) for _ in range(4)]
    given = (qkv, *norms, rotation, slots)
    assert_close(take_heads(*given, *kept[:2], fused=True), take_heads(*given, *kept[2:], fused=False))
    for mine, reference in zip(kept[:2], kept[2:], strict=True):
        assert_close(mine, reference)
        assert (mine[[0, 1, 5, 7, 11]] == 7).all(), "what is before the pictures stays"


@pytest.mark.parametrize("width", [96, 5000])
def test_the_wider_layer_is_gated(width: int) -> None:
    given = drawn(3, 2 * width)
    assert_close(gate(given, fused=True), gate(given))


@torch.inference_mode()
def test_a_picture_decoded_in_kernels_is_that_of_diffusers() -> None:
    vae = QWEN_IMAGE.tiny_vae().to(DEVICE).requires_grad_(False)
    latents = drawn(16, 2, 3)
    theirs = vae.decode(latents[None, :, None], return_dict=False)[0][0, :, 0]
    assert theirs.std() > 0.1
    for fused in (False, True):
        assert_close(PictureDecoder(vae, fused=fused)(latents), theirs)


@torch.inference_mode()
def test_a_step_of_two_pictures_in_kernels_is_that_of_torch() -> None:
    dit = QwenImageNetwork(json.loads(QWEN_IMAGE.tiny_transformer().to_json_string())).to(DEVICE)
    torch.manual_seed(0)
    dit.draw()
    sizes = [(2, 3), (3, 4)]
    patches, moments = drawn(18, dit.channels), torch.tensor([0.3, 0.9]).to(DEVICE)

    def velocities() -> torch.Tensor:
        given = [Prefix(drawn(length, dit.text_width).cpu()) for length in (5, 1)]
        return dit(patches, moments, dit.lay_out(sizes, dit.condition(given)))

    theirs = velocities()
    dit.compile()
    assert dit.fused
    assert_close(velocities(), theirs)


@pytest.mark.parametrize(("channels", "raised", "moments"), [(8, 8, 2), (8, 4, 2), (8, 4, 1), (4, 8, 1)])
def test_shortcuts_take_the_channels_of_diffusers(channels: int, raised: int, moments: int) -> None:
    shortcut = QwenImage21DupUp3D(channels, raised, factor_t=moments, factor_s=2)
    given = drawn(1, channels, 2, 3)
    theirs = shortcut(given[:, :, None], first_chunk=True)[:, :, 0]
    parts = given.permute(0, 2, 3, 1)[..., sources_of(shortcut).to(DEVICE)]  # [1, height, width, 2, 2, channels]
    assert torch.equal(parts.permute(0, 5, 1, 3, 2, 4).reshape(theirs.shape), theirs)


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


def test_on_a_gpu_in_half_precision_vllms_attention_is_used_where_it_is_installed(offer):
    for dtype in (torch.bfloat16, torch.float16):
        offer(kernels(2, 3))
        assert fastest_attention("cuda", dtype).__name__ == "attend_vllm"
        for without in (kernels(), None):
            offer(without)
            assert fastest_attention("cuda", dtype) is attend_varlen
    offer(kernels(2, 3))
    for device, other in (("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.float32)):
        assert fastest_attention(device, other) is attend_each


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
