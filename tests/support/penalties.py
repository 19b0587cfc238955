"""What sampling parameters do to logits, by transformers' processors and plain sums, beside what the engine did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from transformers import RepetitionPenaltyLogitsProcessor
from vllm.sampling_params import SamplingParams

from omni_actors.engine.autoregressive import AutoregressiveEngine


class Sampled:
    """The logits of every token that an engine samples, before and after its parameters are applied.

    Attributes:
        rows: request -> position of the last token that the model has seen -> both rows [vocabulary].
        positions: request -> length of its prompt.
        params: request -> what vLLM was given.
    """

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self.positions: dict[str, int] = {}
        self.params: dict[str, SamplingParams] = {}

    def check(self, request_id: str, given: dict[str, Any], prompt: Sequence[int], out: Sequence[int]) -> None:
        """Compare all rows of a request with what its parameters ask for.

        Args:
            given: the parameters of the request.
            prompt: tokens that count as its prompt.
            out: the tokens that it sampled, or as many of them as are known.
        """
        made = self.params[request_id]
        first = self.positions[request_id] - 1
        rows = {position - first: pair for position, pair in self.rows[request_id].items()}
        steps = [number for number in sorted(rows) if 0 <= number <= len(out)]
        assert steps == list(range(len(steps)))
        assert len(steps) >= len(out)
        for number in steps:
            raw, processed = rows[number]
            wanted = processed_logits(raw, given, prompt, out[:number], made)
            torch.testing.assert_close(processed, wanted, atol=1e-4, rtol=1e-5, msg=f"{request_id}, token {number}")


@contextmanager
def recorded_sampling(engine: AutoregressiveEngine) -> Iterator[Sampled]:
    """Note the logits of every token while the block runs."""
    runner = engine.core.worker.model_runner
    sampler, seen = runner.sampler, Sampled()
    apply, add = sampler.apply_sampling_params, sampler.add_request

    def apply_sampling_params(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raw, slots, positions = logits.float().clone(), args[2].tolist(), args[3].tolist()
        processed = apply(logits, *args, **kwargs)
        names = runner.req_states.index_to_req_id
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            seen.rows.setdefault(names[slot], {})[position] = raw[row].cpu(), processed[row].float().cpu().clone()
        return processed

    def add_request(slot: int, params: SamplingParams) -> None:
        name = runner.req_states.index_to_req_id[slot]
        seen.params[name], seen.positions[name] = params, int(runner.req_states.prompt_len.np[slot])
        add(slot, params)

    sampler.apply_sampling_params, sampler.add_request = apply_sampling_params, add_request
    try:
        yield seen
    finally:
        del sampler.apply_sampling_params, sampler.add_request


def processed_logits(
    raw: torch.Tensor, given: dict[str, Any], prompt: Sequence[int], out: Sequence[int], made: SamplingParams
) -> torch.Tensor:
    """Logits [vocabulary] after a request's parameters, at temperature 1 or greedy; vLLM adds biases first."""
    row = raw.float().clone()
    for token, bias in given.get("logit_bias", {}).items():
        row[token] += bias
    if len(out) < given.get("min_tokens", 0):
        row[sorted(made.all_stop_token_ids)] = -torch.inf
    ids = torch.tensor([[*prompt, *out]], dtype=torch.int64)
    row = RepetitionPenaltyLogitsProcessor(float(given["repetition_penalty"]))(ids, row[None])[0]
    counts = torch.bincount(torch.tensor(list(out), dtype=torch.int64), minlength=len(row))
    row -= given.get("frequency_penalty", 0.0) * counts + given.get("presence_penalty", 0.0) * (counts > 0)
    for word in made.bad_words_token_ids or ():
        if not word[:-1] or list(out[-len(word) + 1 :]) == word[:-1]:
            row[word[-1]] = -torch.inf
    return row


def draw_parameters(generator: Random, tokens: range, length: int) -> dict[str, Any]:
    """Random parameters of one request: always a repetition penalty, any of the others half of the time.

    Args:
        tokens: those that may get a bias.
        length: tokens to sample.
    """
    drawn: dict[str, Any] = {
        "max_tokens": length,
        "ignore_eos": True,
        "temperature": generator.choice((0.0, 1.0)),
        "repetition_penalty": generator.choice((1.05, 1.3, 2.0, 0.7)),
    }
    others = {
        "presence_penalty": generator.uniform(-2, 2),
        "frequency_penalty": generator.uniform(-2, 2),
        "logit_bias": {token: generator.uniform(-5, 5) for token in [0, *generator.sample(tokens, 5)]},
    }
    drawn |= {name: value for name, value in others.items() if generator.random() < 0.5}
    if generator.random() < 0.5:
        drawn |= {"stop_token_ids": [0, *generator.sample(tokens, 3)], "min_tokens": length}
    return drawn
