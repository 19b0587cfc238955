"""Sampling in real vLLM engine cores: seeds, cuts, penalties, stop tokens."""

from __future__ import annotations

import pytest
import torch

from tests.support.stage_driver import BOTH_TALKER_MODES, prompt_length, sample, talker_inputs, token_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@BOTH_TALKER_MODES
def test_a_seed_gives_the_same_tokens_whatever_the_company(talker, answers):
    params = {"max_tokens": 16, "temperature": 1.2, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.05}
    sample(talker, answers[0], "alone", seed=5, **params)
    talker.run()
    alone = talker.tokens("alone")
    for number in range(4):
        sample(talker, answers[1], f"before{number}", seed=number, max_tokens=4 + number, temperature=float(number % 2))
    talker.step()
    sample(talker, answers[0], "again", seed=5, **params)
    sample(talker, answers[0], "other", seed=6, **params)
    sample(talker, answers[0], "own", seed=9, **{**params, "min_p": 0.001})
    talker.start(  # a seed among the parameters wins over the request's
        "params", talker_inputs(answers[0].thinker_rows, prompt_length(answers[0])), seed=77, **{**params}
    )
    talker.run()
    assert talker.tokens("again") == alone
    assert talker.tokens("other") != alone
    assert talker.tokens("params") != alone
    assert len(set(alone)) > 4


def test_cuts_work(talker, answers):
    """At a high temperature each cut to a single token gives the greedy answer; without one it does not."""
    answer = answers[0]
    hot = {"max_tokens": 12, "temperature": 2.0, "seed": 3, "top_p": 1.0, "top_k": -1}
    sample(talker, answer, "free", **hot)
    sample(talker, answer, "top_k", **{**hot, "top_k": 1})
    sample(talker, answer, "top_p", **{**hot, "top_p": 1e-6})
    sample(talker, answer, "min_p", **{**hot, "min_p": 1.0})
    sample(talker, answer, "both", **{**hot, "top_k": 3, "top_p": 0.99})
    sample(talker, answer, "greedy", **{**hot, "temperature": 0.0})
    talker.run()
    greedy = answer.codec_tokens[:12]
    for name in ("top_k", "top_p", "min_p", "greedy"):
        assert talker.tokens(name) == greedy
    assert talker.tokens("free") != greedy
    assert talker.tokens("both") != talker.tokens("free")


def test_top_k_draws_only_from_the_k_likeliest(thinker, answers):
    """The first token's distribution, drawn with many seeds, in one batch with other requests."""
    inputs = token_inputs(answers[0].prompt_token_ids)
    runner = thinker.engine.core.worker.model_runner
    seen: list[torch.Tensor] = []
    original = runner.model.compute_logits

    def compute_logits(hidden_states):
        logits = original(hidden_states)
        seen.append(logits.clone())
        return logits

    runner.model.compute_logits = compute_logits
    try:
        thinker.start("greedy", inputs, max_tokens=1, streams=False)
        thinker.run()
        drawn = []
        for first in range(0, 48, 16):
            for seed in range(first, first + 16):
                thinker.start(f"s{seed}", inputs, seed=seed, max_tokens=1, temperature=2.0, top_k=3, streams=False)
            thinker.run()
            drawn += [thinker.tokens(f"s{seed}")[0] for seed in range(first, first + 16)]
    finally:
        del runner.model.compute_logits
    likeliest = set(seen[0][0].topk(3).indices.tolist())
    assert set(drawn) == likeliest


def test_repetition_penalty_and_stop_tokens(thinker, answers):
    answer = answers[0]
    inputs = token_inputs(answer.prompt_token_ids)
    thinker.start("plain", inputs, max_tokens=24)
    thinker.start("penalty", inputs, max_tokens=24, repetition_penalty=10.0)
    thinker.run()
    tokens = thinker.tokens("penalty")
    assert tokens != thinker.tokens("plain")
    assert len(set(tokens)) == len(tokens)
    assert not set(tokens) & set(answer.prompt_token_ids)
    thinker.start("stop", inputs, max_tokens=24, temperature=1.0, seed=4)
    thinker.run()
    stop = thinker.tokens("stop")[7]
    thinker.start("again", inputs, max_tokens=24, temperature=1.0, seed=4, stop_token_ids=(stop,))
    thinker.run()
    expected = thinker.tokens("stop")[: thinker.tokens("stop").index(stop) + 1]
    assert thinker.tokens("again") == expected
