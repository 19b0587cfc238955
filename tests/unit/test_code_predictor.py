"""The code predictor: what it draws, and its few kernels against torch's many: compiled on a GPU, else interpreted."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from omni_actors.engine.models import fused_predictor
from omni_actors.engine.models.code_predictor import CodePredictor, PredictorConfig, batch_sizes
from tools.checkpoints.tts import SAMPLING

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, VOCABULARY = 32, 112


def made(input_size: int = WIDTH, layers: int = 1, **sampling: float) -> CodePredictor:
    """A predictor of three groups, all of whose weights are random."""
    config = PredictorConfig(3, VOCABULARY, input_size, WIDTH, 48, layers, 2, 1, 16, 10_000.0, **sampling)  # type: ignore[arg-type]
    predictor = CodePredictor(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in predictor.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return predictor.eval().to(DEVICE)


def given(count: int, width: int = WIDTH) -> tuple[torch.Tensor, ...]:
    """Inputs of `count` frames, every third of which is greedy."""
    hidden, first = torch.randn(2, count, width, generator=torch.Generator().manual_seed(count))
    seeds = torch.arange(count) * 0x1_0000_0001
    inputs = (hidden, first, seeds, torch.arange(count) % 3, torch.arange(count) % 3 == 2)
    return tuple(tensor.to(DEVICE) for tensor in inputs)


@pytest.mark.parametrize(("count", "input_size", "layers"), [(1, 48, 2), (17, WIDTH, 1)])
@torch.inference_mode()
def test_frames_are_those_of_torch(count: int, input_size: int, layers: int) -> None:
    predictor, inputs = made(input_size, layers), given(count, input_size)
    predictor.fused = False
    codes, sums = fused_predictor.complete(predictor, *inputs)
    wanted_codes, wanted_sums = predictor(*inputs)
    assert torch.equal(codes, wanted_codes)
    torch.testing.assert_close(sums, wanted_sums, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 50, 0.8), (0.9, 50, 1.0), (0.7, 5, 0.5), (2.0, VOCABULARY, 0.3), (1, 1, 1)],
)
@torch.inference_mode()
def test_draws_are_those_of_torch(temperature: float, top_k: int, top_p: float) -> None:
    count, group = 12, 0
    predictor = made(temperature=temperature, top_k=top_k, top_p=top_p)
    frame = fused_predictor.FrameKernels(predictor, count)
    hidden, _, seeds, frames, greedy = given(count)
    frame.enter(hidden)
    codes = torch.zeros((count, 2), dtype=torch.int64, device=DEVICE)
    total, summed = hidden.clone(), torch.empty_like(hidden)
    frame.draw(group, codes, total, summed, seeds, frames, greedy)
    wanted = predictor.sample(frame.logits, predictor.noise(seeds, frames)[:, group], greedy)
    assert torch.equal(codes[:, group], wanted)
    embedded = predictor.embeddings[group][wanted]
    assert torch.equal(frame.x, embedded), "it is read next"
    torch.testing.assert_close(total, hidden + embedded)


@torch.inference_mode()
def test_of_equal_values_at_the_limit_of_top_k_none_is_left_out() -> None:
    count = 12
    predictor = made(temperature=1.0, top_k=2, top_p=1.0)
    with torch.no_grad():
        predictor.layers[0].input_norm.fill_(1.0)
        predictor.heads.zero_()
        predictor.heads[0, :4] = 1.0  # four codes are likelier than all others, and equally likely
    frame = fused_predictor.FrameKernels(predictor, count)
    frame.enter(torch.ones(count, WIDTH, device=DEVICE))
    _, _, seeds, frames, greedy = given(count)
    codes = torch.zeros((count, 2), dtype=torch.int64, device=DEVICE)
    sums = torch.zeros(count, WIDTH, device=DEVICE)
    frame.draw(0, codes, sums, sums.clone(), seeds, frames, torch.zeros_like(greedy))
    assert set(codes[:, 0].tolist()) == {0, 1, 2, 3}


def test_sizes_that_the_kernels_do_not_take_are_left_to_torch() -> None:
    config = made().config
    assert fused_predictor.fits(config, 1)
    assert fused_predictor.fits(config, fused_predictor.MOST_ROWS)
    assert not fused_predictor.fits(config, fused_predictor.MOST_ROWS + 1)
    assert not fused_predictor.fits(config, 0)
    values = {name: getattr(config, name) for name in PredictorConfig.__dataclass_fields__}
    for name, size in (("head_dim", 24), ("intermediate_size", 40), ("vocab_size", 100), ("input_size", 24)):
        assert not fused_predictor.fits(PredictorConfig(**{**values, name: size}), 1)


# As published: transformers' Qwen3-Omni has these values in its code, Qwen3-TTS in generation_config.json.
PUBLISHED = {
    "Qwen3-Omni": {"temperature": 1.0, "top_k": 50, "top_p": 0.8},
    "Qwen3-TTS": {name: SAMPLING[f"subtalker_{name}"] for name in ("temperature", "top_k", "top_p")},
}


@pytest.mark.parametrize("family", PUBLISHED)
@torch.inference_mode()
def test_draws_follow_the_distribution_of_transformers_warpers(family: str) -> None:
    draws, published = 6_000, PUBLISHED[family]
    predictor = made(**published)
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
    warped = TemperatureLogitsWarper(published["temperature"])(None, logits.unsqueeze(0))
    warped = TopPLogitsWarper(published["top_p"])(None, TopKLogitsWarper(published["top_k"])(None, warped))
    wanted = warped.softmax(dim=-1)[0]
    frames = torch.arange(draws)
    noise = predictor.noise(frames // 100, frames % 100)[:, 1]
    codes = predictor.sample(logits.expand(draws, -1), noise, torch.zeros(draws).bool())
    seen = codes.bincount(minlength=VOCABULARY) / draws
    assert set(seen.nonzero().flatten().tolist()) <= set(wanted.nonzero().flatten().tolist())
    torch.testing.assert_close(seen, wanted, atol=0.03, rtol=0)


@torch.inference_mode()
def test_known_frames_have_the_same_sums() -> None:
    predictor, inputs = made(), given(5)
    codes, sums = predictor(*inputs)
    assert torch.equal(predictor.embed(codes, inputs[1]), sums)


def test_the_largest_batch_always_has_a_graph() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert batch_sizes(64) == [1, 2, 4, 8, 16, 32, 48, 64]
