"""What sampling parameters do to logits, by transformers' processors and plain sums, beside what an engine did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

import torch
from transformers import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper
from vllm.sampling_params import SamplingParams

from omni_actors.engine.autoregressive import AutoregressiveEngine

ROUNDING = 1e-5  # of a sum of probabilities: whether a token is among the likeliest may hang on it


class Logits(NamedTuple):
    """Logits [vocabulary] of a token: the model's, with penalties and temperature, and what it is drawn from."""

    raw: torch.Tensor
    processed: torch.Tensor
    drawn: torch.Tensor


class Sampled:
    """The logits of every token that an engine samples.

    Attributes:
        rows: request -> position of the last token that the model has seen -> its logits.
        positions: request -> length of its prompt.
        params: request -> what vLLM was given.
    """

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, Logits]] = {}
        self.positions: dict[str, int] = {}
        self.params: dict[str, SamplingParams] = {}

    def steps(self, request_id: str, count: int) -> list[Logits]:
        """The logits of the first `count` tokens of a request, and perhaps of the next one."""
        first = self.positions[request_id] - 1
        rows = {position - first: row for position, row in self.rows[request_id].items()}
        steps = [number for number in sorted(rows) if 0 <= number <= count]
        assert steps == list(range(len(steps)))
        assert len(steps) >= count
        return [rows[number] for number in steps]

    def check(self, request_id: str, given: dict[str, Any], prompt: Sequence[int], out: Sequence[int]) -> None:
        """Compare all rows of a request with what its parameters ask for.

        Args:
            given: the parameters of the request.
            prompt: tokens that count as its prompt.
            out: the tokens that it sampled, or as many of them as are known.
        """
        made = self.params[request_id]
        for number, (raw, processed, drawn) in enumerate(self.steps(request_id, len(out))):
            where = f"{request_id}, token {number}"
            wanted = processed_logits(raw, given, prompt, out[:number], made)
            torch.testing.assert_close(processed, wanted, atol=1e-4, rtol=1e-5, msg=where)
            if given["temperature"]:
                kept, surely, perhaps = (
                    each.isfinite()
                    for each in (drawn, *(likeliest(processed, given, slack) for slack in (-ROUNDING, ROUNDING)))
                )
                # Of equal logits any may be cut off, so that the sum is reached.
                assert kept[processed > processed.masked_fill(surely, -torch.inf).max()].all(), where
                assert not kept[processed < processed[perhaps].min()].any(), where
                assert torch.equal(drawn[kept], processed[kept]), where


@contextmanager
def recorded_sampling(engine: AutoregressiveEngine) -> Iterator[Sampled]:
    """Note the logits of every token while the block runs."""
    runner = engine.core.worker.model_runner
    sampler, seen = runner.sampler, Sampled()
    apply, add, draw = sampler.apply_sampling_params, sampler.add_request, sampler.sample
    step: list[tuple[str, int, torch.Tensor, torch.Tensor]] = []  # request, position, its raw and processed logits

    def apply_sampling_params(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raw, slots, positions = logits.float().cpu().clone(), args[2].tolist(), args[3].tolist()
        made = apply(logits, *args, **kwargs)
        names = (runner.req_states.index_to_req_id[slot] for slot in slots)
        step[:] = zip(names, positions, raw, made.float().cpu().clone(), strict=True)
        return made

    def sample(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logits = draw(*args, **kwargs)
        for (name, position, raw, processed), drawn in zip(step, logits.float().cpu().clone(), strict=True):
            # When it is computed again after a preemption, tokens that come after it count, too.
            seen.rows.setdefault(name, {}).setdefault(position, Logits(raw, processed, drawn))
        return tokens, logits

    def add_request(slot: int, params: SamplingParams) -> None:
        name = runner.req_states.index_to_req_id[slot]
        seen.params[name], seen.positions[name] = params, int(runner.req_states.prompt_len.np[slot])
        add(slot, params)

    own = {"apply_sampling_params": apply_sampling_params, "sample": sample, "add_request": add_request}
    vars(sampler).update(own)
    try:
        yield seen
    finally:
        for name in own:
            delattr(sampler, name)  # uncovers the method of the class


def processed_logits(
    raw: torch.Tensor, given: dict[str, Any], prompt: Sequence[int], out: Sequence[int], made: SamplingParams
) -> torch.Tensor:
    """Logits [vocabulary] after a request's penalties and temperature; vLLM adds biases first."""
    row = raw.float().clone()
    for token, bias in (made.logit_bias or {}).items():  # with ends that a talker is to ignore
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
    return row / (given["temperature"] or 1.0)


def likeliest(row: torch.Tensor, given: dict[str, Any], slack: float) -> torch.Tensor:
    """Which logits [vocabulary] a request may draw from, minus infinity for the others.

    Args:
        slack: in what the probabilities of the likeliest add up to.
    """
    row = row[None]
    if top_k := given.get("top_k"):
        row = TopKLogitsWarper(top_k)(None, row)
    if (top_p := given.get("top_p", 1.0)) < 1:
        row = TopPLogitsWarper(top_p + slack)(None, row)
    return row[0]


def draw_parameters(generator: Random, tokens: range, length: int) -> dict[str, Any]:
    """Random parameters of one request: always a repetition penalty, any of the others half of the time.

    Args:
        tokens: those that may get a bias.
        length: tokens to sample.
    """
    drawn: dict[str, Any] = {
        "max_tokens": length,
        "ignore_eos": True,
        "temperature": generator.choice((0.0, 0.9, 1.0)),
        "top_k": generator.choice((0, 1, 20, 40)),
        "top_p": generator.choice((0.3, 0.8, 1.0)),
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
