"""The code predictor: what it draws, and that a draw hangs on its own request alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from omni_actors.engine.models.code_predictor import CodePredictor, PredictorConfig, batch_sizes
from tools.checkpoints.tts import SAMPLING

VOCABULARY = 128


@pytest.fixture(scope="module")
def predictor() -> CodePredictor:
    torch.manual_seed(0)
    config = PredictorConfig(4, VOCABULARY, 48, 32, 64, 2, 4, 2, 8, 10_000.0)
    made = CodePredictor(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5)
    return made.eval()


def given(count: int, greedy: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    hidden, first = torch.randn(2, count, 48, generator=generator)
    seeds = torch.arange(count) * 0x1_0000_0001
    return hidden, first, seeds, torch.arange(count) % 3, torch.full((count,), greedy)


# As published: transformers' Qwen3-Omni has these values in its code, Qwen3-TTS in generation_config.json.
PUBLISHED = {
    "Qwen3-Omni": {"temperature": 1.0, "top_k": 50, "top_p": 0.8},
    "Qwen3-TTS": {name: SAMPLING[f"subtalker_{name}"] for name in ("temperature", "top_k", "top_p")},
}


@pytest.mark.parametrize("family", PUBLISHED)
@torch.inference_mode()
def test_draws_follow_the_distribution_of_transformers_warpers(predictor: CodePredictor, family: str) -> None:
    draws, given = 6_000, PUBLISHED[family]
    predictor = CodePredictor(replace(predictor.config, **given))
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
    warped = TemperatureLogitsWarper(given["temperature"])(None, logits.unsqueeze(0))
    warped = TopPLogitsWarper(given["top_p"])(None, TopKLogitsWarper(given["top_k"])(None, warped))
    wanted = warped.softmax(dim=-1)[0]
    frames = torch.arange(draws)
    noise = predictor.noise(frames // 100, frames % 100)[:, 2]
    codes = predictor.sample(logits.expand(draws, -1), noise, torch.zeros(draws).bool())
    seen = codes.bincount(minlength=VOCABULARY) / draws
    assert set(seen.nonzero().flatten().tolist()) <= set(wanted.nonzero().flatten().tolist())
    torch.testing.assert_close(seen, wanted, atol=0.03, rtol=0)


@torch.inference_mode()
def test_known_frames_have_the_same_sums(predictor: CodePredictor) -> None:
    inputs = given(5, greedy=True)
    codes, sums = predictor(*inputs)
    assert torch.equal(predictor.embed(codes, inputs[1]), sums)


def test_the_largest_batch_always_has_a_graph() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert batch_sizes(64) == [1, 2, 4, 8, 16, 32, 48, 64]
