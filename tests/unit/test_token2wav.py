"""The vocoder's parts without an engine: chunk policy, noise, receptive field, and the fused kernels against torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAntiAliasedActivation1d,
    Qwen2_5OmniSnakeBeta,
    Qwen2_5OmniToken2WavBigVGANModel,
)

from omni_actors.engine.models.chunks import ChunkPolicy, read_decode
from omni_actors.engine.models.qwen2_5_omni import bigvgan, kernels
from omni_actors.engine.models.qwen2_5_omni.dit import GRAPH_ROWS, SOLVERS, graph_rows
from omni_actors.engine.models.qwen2_5_omni.stream import NoiseBlocks
from omni_actors.errors import ConfigError
from tests.support.commands import python
from tests.support.reference import vocoder_noise

# Compiled where there is a GPU, else interpreted.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_chunks_that_the_models_own_contradict_are_refused():
    with pytest.raises(ConfigError, match="the first chunk has 3 blocks"):
        read_decode({"largest_blocks": 2}, ChunkPolicy(3), tuple(SOLVERS))


def test_noise_does_not_depend_on_the_length_or_on_how_it_is_taken():
    whole = NoiseBlocks(7, 24, 80).take(0, 9)
    pieces = NoiseBlocks(7, 24, 80)
    assert torch.equal(pieces.take(0, 3), whole[:3])
    assert torch.equal(pieces.take(2, 7), whole[2:7])  # the look-ahead of one chunk is the beginning of the next
    assert torch.equal(pieces.take(7, 9), whole[7:])
    assert not torch.equal(NoiseBlocks(8, 24, 80).take(0, 1), whole[:1])
    for frames in (10, 24, 100):
        assert torch.equal(vocoder_noise(7, frames, 80)[0], whole.flatten(0, 1)[:frames])


@pytest.fixture(scope="module")
def small_bigvgan() -> Qwen2_5OmniToken2WavBigVGANModel:
    config = Qwen2_5OmniBigVGANConfig(
        mel_dim=4,
        upsample_initial_channel=16,
        resblock_kernel_sizes=[3, 5],
        resblock_dilation_sizes=[[1, 3, 5]] * 2,
        upsample_rates=[5, 2],
        upsample_kernel_sizes=[11, 4],
    )
    torch.manual_seed(0)
    model = Qwen2_5OmniToken2WavBigVGANModel(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_receptive_field_is_enough_and_tight(small_bigvgan: Qwen2_5OmniToken2WavBigVGANModel):
    vocoder = bigvgan.Vocoder(small_bigvgan)
    context, rate = bigvgan.receptive_frames(small_bigvgan.config), vocoder.samples_per_frame
    frames = 2 * context + 12
    mel = torch.zeros(1, 4, frames, dtype=torch.float64, requires_grad=True)
    hidden = small_bigvgan.conv_pre(mel)  # its normalisation clamps, which would hide the gradient
    count = small_bigvgan.num_residual_blocks
    for index, (upsample,) in enumerate(small_bigvgan.ups):
        hidden = upsample(hidden)
        hidden = sum(block(hidden) for block in small_bigvgan.resblocks[index * count :][:count])
    wave = small_bigvgan.conv_post(small_bigvgan.activation_post(hidden))[0, 0]
    middle = frames // 2
    reached = torch.zeros(frames, dtype=torch.bool)
    for sample in range(middle * rate, (middle + 1) * rate):
        (gradient,) = torch.autograd.grad(wave[sample], mel, retain_graph=True)
        reached |= gradient[0].abs().amax(0) > 0
    places = reached.nonzero().flatten()
    reach = max(middle - int(places.min()), int(places.max()) - middle)
    assert context - 2 <= reach <= context


def test_channels_last_vocoder_is_the_same(
    small_bigvgan: Qwen2_5OmniToken2WavBigVGANModel, monkeypatch: pytest.MonkeyPatch
):
    """The layout; the activation itself is compared below."""

    def activation(module: Qwen2_5OmniAntiAliasedActivation1d, offset: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda hidden: module(hidden[:, :, 0] + offset[:, None])[:, :, None]

    monkeypatch.setattr(bigvgan, "_Activation", activation)
    fused = bigvgan.FusedVocoder(small_bigvgan, torch.float64)
    mel = torch.randn(3, 4, 20, dtype=torch.float64)
    assert torch.allclose(fused(mel), bigvgan.Vocoder(small_bigvgan)(mel).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [1, 19])
def test_snake_kernel(length: int):
    torch.manual_seed(length)
    module = Qwen2_5OmniAntiAliasedActivation1d(Qwen2_5OmniSnakeBeta(40)).to(DEVICE).requires_grad_(False)
    torch.nn.init.normal_(module.act.alpha, std=0.5)
    torch.nn.init.normal_(module.act.beta, std=0.5)
    hidden = 3 * torch.randn(2, 40, length, device=DEVICE)
    offset = torch.randn(40, device=DEVICE)
    fused = kernels.anti_aliased_snake(hidden[:, :, None], *bigvgan._Activation(module, offset).parameters)
    assert torch.allclose(fused[:, :, 0], module(hidden + offset[:, None]), rtol=0, atol=1e-5)


@pytest.mark.nightly
def test_snake_kernel_carries_its_values_through_the_loop_when_compiled():
    """Triton's interpreter runs Python, its compiler does not: once it took the rotated values for constants."""
    script = """
import importlib.util, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
pointers = dict.fromkeys(("source", "output", "offset", "up", "down", "frequency", "magnitude"), "*fp32")
signature = {**pointers, "length": "i32", "channels": "i32", "STEPS": "constexpr", "LANES": "constexpr"}
source = ASTSource(kernels._anti_aliased_snake, signature=signature, constexprs={"STEPS": 8, "LANES": 32})
text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
loop = text[text.index("scf.for"):].split("->")[0]
print(loop.count(" = %") - 1)
"""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    path = str(Path(kernels.__file__))
    done = python("-c", script, path, env=environment)
    if "ptxas" in done.stderr:
        pytest.skip("this Triton has no assembler")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 17  # six samples, eleven values of the doubled rate


@pytest.mark.parametrize(("back", "ahead"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_attention_kernel(back: int, ahead: int):
    torch.manual_seed(0)
    heads, width, window = 2, 64, back + 1 + ahead
    qkv = torch.randn(4, 24, 3 * width, device=DEVICE)
    left = torch.randn(2, 24, 2 * width, device=DEVICE)
    keys, valid = torch.full((4, window), -1, dtype=torch.int32), torch.zeros(4, window, dtype=torch.int32)
    keys[:, back], valid[:, back] = torch.arange(4), torch.tensor([24, 24, 24, 7])
    if back:
        keys[1:, 0], valid[1:, 0] = torch.tensor([0, 5, 4]), 24  # the last two were kept of earlier chunks
    if ahead:
        keys[2, -1], valid[2, -1] = 3, 7
    rotary = torch.randn(window * 24, 16, device=DEVICE), torch.randn(window * 24, 16, device=DEVICE)
    tables = keys.to(DEVICE), valid.to(DEVICE)
    plain, fused = (
        kernels.block_attention(qkv, left, *tables, rotary, heads, back=back, precise=True, fused=form)
        for form in (False, True)
    )
    assert torch.allclose(plain, fused, rtol=0, atol=1e-5)


@pytest.mark.parametrize("most", [6, 7, 144, 576, GRAPH_ROWS[-1]])
def test_every_step_has_a_graph_that_is_not_much_larger_and_none_larger_than_any_step(most: int) -> None:
    assert graph_rows(4) == (4,)
    assert graph_rows(10 * GRAPH_ROWS[-1]) == GRAPH_ROWS
    sizes = graph_rows(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(6, most + 1):
        assert next(size for size in sizes if size >= rows) <= max(1.5 * rows, rows + 4)
