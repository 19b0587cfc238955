"""The vocoder's products in eight bits: the kernels that quantise, and a network that uses them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from omni_actors.engine.platform import prepare

prepare()

from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig  # noqa: E402
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavDiTModel  # noqa: E402

from omni_actors.engine.models.chunks import ChunkPolicy, DecodeOptions  # noqa: E402
from omni_actors.engine.models.qwen2_5_omni.dit import Dit  # noqa: E402
from omni_actors.engine.models.qwen2_5_omni.dit_layout import DitChunk  # noqa: E402
from omni_actors.engine.models.qwen2_5_omni.kernels import Fp8Rows, NormInputs, quantise, quantise_rows, quantised_norm  # noqa: E402
from omni_actors.engine.models.qwen2_5_omni.products import Fp8Products, LayerWeights, check_fp8  # noqa: E402
from omni_actors.errors import ConfigError  # noqa: E402

# Compiled where there is a GPU, else interpreted.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEP = 2.0**-4  # of a number in e4m3, in parts of it: half of the distance to the next


def exact(rows: Fp8Rows) -> torch.Tensor:
    return rows.values.float() * rows.scales


def assert_same_rows(fused: Fp8Rows, plain: Fp8Rows, source: torch.Tensor) -> None:
    """Compares all numbers but those that rounding takes to a power of two, which Triton's interpreter halves."""
    assert torch.allclose(fused.scales, plain.scales, rtol=1e-5, atol=0)
    values = plain.values.float()
    carried = (values.abs().log2().frac() == 0) & (source.abs() < exact(plain).abs())
    assert carried.float().mean() < 0.1
    difference = (exact(fused) - source).abs()
    assert (difference <= STEP * source.abs() + 2e-3 * fused.scales)[~carried].all()


@pytest.mark.parametrize("gelu", [False, True])
def test_rows_of_any_size_are_quantised_by_the_kernel_as_in_torch(gelu: bool):
    torch.manual_seed(0)
    rows = torch.randn(2, 24, 40, device=DEVICE) * torch.logspace(-3, 0.3, 24, device=DEVICE)[:, None]
    rows[0, 3] = 0
    fused, plain = (quantise_rows(rows, gelu=gelu, fused=form) for form in (True, False))
    assert_same_rows(fused, plain, F.gelu(rows, approximate="tanh") if gelu else rows)
    assert torch.equal(exact(plain)[0, 3], torch.zeros(40, device=DEVICE))


@pytest.mark.parametrize("update", [False, True])
def test_a_norm_is_quantised_by_the_kernel_as_in_torch(update: bool):
    torch.manual_seed(0)
    residual, added = torch.randn(3, 24, 48, device=DEVICE), torch.randn(3, 24, 48, device=DEVICE)
    gate, scale, shift = torch.randn(2, 3 * 48, device=DEVICE).split(48, dim=1)
    slot = torch.tensor([0, 1, 1], device=DEVICE)
    results, states = [], []
    for fused in (True, False):
        states.append(residual.clone())
        given = (added, gate) if update else (None, None)
        results.append(quantised_norm(NormInputs(states[-1], *given, scale, shift, slot), fused=fused))
    normed = F.layer_norm(states[1], (48,), eps=1e-6) * (1 + scale[slot][:, None]) + shift[slot][:, None]
    assert_same_rows(*results, normed)
    assert torch.allclose(*states, atol=1e-6)
    assert torch.equal(states[0], residual) is not update


def test_numbers_that_are_none_stay_so():
    """A waveform of a network that has lost its numbers must be seen as such."""
    rows = torch.ones(2, 32, device=DEVICE)
    rows[0, 5], rows[1, 5] = torch.nan, torch.inf
    assert not exact(quantise(rows)).isfinite().all(dim=1).any()


# -- products and the network -----------------------------------------------------------------------------------------


def layer_weights(width: int) -> LayerWeights:
    sizes = [(3 * width, width), (width, width), (2 * width, width), (width, 2 * width)]
    made = [
        (torch.randn(outputs, inputs, device=DEVICE), torch.randn(outputs, device=DEVICE)) for outputs, inputs in sizes
    ]
    return LayerWeights(*made)


def test_a_product_is_that_of_the_quantised_factors():
    torch.manual_seed(0)
    weights = layer_weights(64)
    for weight, _ in weights:
        weight *= torch.logspace(-2, 2, len(weight), device=DEVICE)[:, None]  # channels of any size
    mixed = torch.randn(3, 24, 64, device=DEVICE, dtype=torch.bfloat16)
    weight, bias = weights.out
    wanted = F.linear(exact(quantise(mixed)).double(), exact(quantise(weight)).double(), bias.bfloat16().double())
    product = Fp8Products(weights, torch.bfloat16, fused=False).out(mixed)
    assert product.dtype == torch.bfloat16
    assert torch.allclose(product.double(), wanted, rtol=2**-7, atol=1e-4)
    unquantised = F.linear(mixed.double(), weight.double(), bias.double())
    distance = ((wanted - unquantised).norm(dim=(0, 1)) / unquantised.norm(dim=(0, 1))).max()
    assert 0.005 < distance < 0.06


@pytest.fixture(scope="module")
def network() -> Qwen2_5OmniToken2WavDiTModel:
    config = Qwen2_5OmniDiTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=32,
        emb_dim=16,
        num_embeds=40,
        mel_dim=8,
        enc_dim=8,
        enc_emb_dim=12,
        enc_channels=[8, 8, 8, 8, 16],
        enc_attention_channels=4,
        enc_res2net_scale=2,
        enc_se_channels=4,
        look_ahead_layers=[1],
        look_backward_layers=[0, 2],
    )
    torch.manual_seed(0)
    model = Qwen2_5OmniToken2WavDiTModel(config).to(DEVICE).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


Advance = Callable[[int | None, int], torch.Tensor]


@pytest.fixture(scope="module")
def advance(network: Qwen2_5OmniToken2WavDiTModel) -> Advance:
    """The state after one interval, of a chunk of some blocks without guidance, whose batch has as many rows."""

    def interval(fp8_rows: int | None, blocks: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        dit = Dit(network, dtype=dtype, precise=True, max_requests=2, fp8_rows=fp8_rows)
        generator = torch.Generator().manual_seed(1)
        state = torch.randn(blocks, 24, 8, generator=generator).to(DEVICE)
        fixed = torch.randn(blocks, 24, 64, generator=generator).to(DEVICE)
        (after,) = dit.advance([DitChunk(state, fixed, 24 * blocks, 0.0, (0.0, 0.2))])
        return after - state

    return interval


def test_a_network_in_fp8_is_near_that_in_bf16(advance: Advance):
    plain, fp8 = advance(None, 4), advance(0, 4)
    distance = ((fp8 - plain).norm() / plain.norm()).item()
    assert 0.002 < distance < 0.05


def test_batches_of_few_rows_keep_bf16(advance: Advance):
    for blocks, rounded in ((2, False), (3, True), (4, True)):
        assert torch.equal(advance(3, blocks), advance(0 if rounded else None, blocks))
        assert not torch.equal(advance(3, blocks), advance(None if rounded else 0, blocks))


# -- configuration ----------------------------------------------------------------------------------------------------


def test_fp8_is_a_choice_for_models_that_have_it():
    assert DecodeOptions.from_mapping({"precision": "fp8"}, ChunkPolicy(), fp8=True).precision == "fp8"
    with pytest.raises(ConfigError, match=r"decode.precision is 'fp8'; for this model .* auto, float32, tf32, bf16\."):
        DecodeOptions.from_mapping({"precision": "fp8"}, ChunkPolicy())


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_such_products_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fits: bool
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    check_fp8(torch.device("cpu"))
    if fits:
        check_fp8(torch.device("cuda"))
        return
    with pytest.raises(ConfigError, match=r"'fp8', which needs a GPU of compute capability 8.9 or above, not 8.0"):
        check_fp8(torch.device("cuda"))
